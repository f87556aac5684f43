"""Builtin data: the sets in Kronoscope's own dependencies."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from catalog.requests.inputs import BuiltinData
from worker.execution.data.bundled import digits, english_bytes, english_paragraphs
from worker.execution.data.forward_inputs import model_inputs
from worker.execution.data.request import DataRequest
from worker.execution.data.stream import Chunk, DataStream
from worker.execution.data.texts.text import text_stream
from worker.execution.refusal import Refusal

_CHUNK = 1024
_TOKENS = 128
"""English is cut at this many tokens (at 64 bytes for the byte model)."""


def _ignore(*_: object) -> None:
    """Discard the report."""


def load(source: BuiltinData, request: DataRequest) -> DataStream:
    """Open the digits as images with classes, or English as bytes or as the model's own tokens."""
    if source.name == "digits":
        return _digits(source, request)
    vocabulary = request.loaded.vocabulary
    if vocabulary is not None and vocabulary.arguments:
        # that its paragraphs are cut is what this data set is
        quiet = replace(request, context=replace(request.context, log=_ignore, note=_ignore))
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
