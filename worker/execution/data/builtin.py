"""Builtin data, which every installation carries: scikit-learn's digits and Python's own documentation."""

import importlib
import importlib.util
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from catalog.requests.inputs import BuiltinData
from worker.execution.data.forward_inputs import model_inputs
from worker.execution.data.stream import Chunk, DataRequest, DataStream
from worker.execution.data.texts.text import text_stream
from worker.execution.refusal import Refusal

TEST_EXAMPLES = 360
"""The digits that the builtin models never train on: the last fifth."""
_CHUNK = 1024
_TOKENS = 128
"""English is cut at this many tokens (at 64 bytes for the byte model)."""


def digits() -> tuple[Tensor, Tensor]:
    """1,797 images (N, 1, 8, 8) with values in [0, 1], and their classes."""
    table = torch.from_numpy(_table_of_digits())
    return table[:, :-1].to(torch.float32).view(-1, 1, 8, 8) / 16, table[:, -1].to(torch.int64)


def _table_of_digits() -> np.ndarray:
    """The 64 pixels and the class of each digit, shape (1797, 65), float64.

    ``load_digits`` reads the same file. To import it takes a second, for SciPy's statistics and pandas.
    """
    package = importlib.util.find_spec("sklearn")
    file = Path((package and package.origin) or "").with_name("datasets") / "data/digits.csv.gz"
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    # a version that keeps it elsewhere
    images, classes = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    return np.column_stack((images, classes))


def english_paragraphs() -> list[str]:
    """Paragraphs of Python's language reference, in a fixed order, each of at least 80 characters."""
    topics = pydoc_data.topics.topics
    found = []
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            text = " ".join(paragraph.split())
            if len(text) >= 80:
                found.append(text)
    return found


def english_bytes(length: int) -> Tensor:
    """Return the bundled text as rows of byte values that do not overlap, shape (N, length), int64, 0 to 255."""
    text = "\n".join(english_paragraphs()).encode()
    rows = len(text) // length
    return torch.frombuffer(bytearray(text[: rows * length]), dtype=torch.uint8).to(torch.int64).view(rows, length)


def load(source: BuiltinData, request: DataRequest) -> DataStream:
    """Open the digits as images with classes, or English as bytes or as the model's own tokens."""
    if source.name == "digits":
        return _digits(source, request)
    vocabulary = request.loaded.vocabulary
    if vocabulary is not None and vocabulary.arguments:
        # that its paragraphs are cut is what this data set is
        quiet = replace(request, context=replace(request.context, log=lambda *_: None, note=lambda *_: None))
        return text_stream(english_paragraphs()[: source.limit], None, _TOKENS, quiet, "/data")
    rows = english_bytes((vocabulary.max_length if vocabulary is not None else None) or 64)[: source.limit]
    if request.task.type != "causal_lm":
        raise Refusal("`english` as bytes fits `causal_lm` only", pointer="/task/type")

    def batches() -> Iterator[Chunk]:
        for start in range(0, len(rows), _CHUNK):
            yield rows[start : start + _CHUNK], rows[start : start + _CHUNK]

    return DataStream(batches=batches, examples=len(rows))


def _digits(source: BuiltinData, request: DataRequest) -> DataStream:
    if request.loaded.vocabulary is not None:
        raise Refusal(
            "`digits` are images, but the model reads tokens; take `english`, or a file", pointer="/data/name"
        )
    images, classes = digits()
    images, classes = images[: source.limit], classes[: source.limit]

    def batches() -> Iterator[Chunk]:
        for start in range(0, len(images), _CHUNK):
            part = slice(start, start + _CHUNK)
            yield model_inputs(images[part], request.loaded), classes[part]

    return DataStream(
        batches=batches,
        examples=len(images),
        labels=lambda: iter([(classes, torch.arange(len(classes)))]),
    )
