"""Data in one file: safetensors (`inputs`, `targets`), JSON lines (`text`, `label`) or lines of text."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from catalog.inputs import DataFile
from worker.execution.data.byte_count import ByteCount
from worker.execution.data.forward_inputs import model_inputs
from worker.execution.data.labels import label_fault, read_label
from worker.execution.data.request import DataRequest
from worker.execution.data.stream import Chunk, DataStream
from worker.execution.data.text import text_stream
from worker.execution.files.open_files import OpenFile
from worker.execution.files.safetensors_header import TensorEntry, read_header
from worker.execution.refusal import Refusal, is_storable, names

_POINTER = "/data/path"
_MAX_LINE_BYTES = 2**20
_CHUNK_BYTES = 64 * 2**20
_SUFFIXES = (".safetensors", ".jsonl", ".txt")


def load(source: DataFile, request: DataRequest) -> DataStream:
    """Open a file by its suffix: `.safetensors`, `.jsonl` or `.txt`.

    Args:
        source: The data's block of the document.
        request: The model, the task and the batches that are wanted.

    Returns:
        The stream: the file's tensors along dimension 0, or the tokens of its texts.

    Raises:
        Refusal: If the path is not allowed or is a folder, or its content cannot be read as its suffix says.
    """
    path = request.context.open_path(source.path, _POINTER)
    if not isinstance(path, OpenFile):
        raise Refusal(f"{source.path} is a folder; give a file", pointer=_POINTER)
    # the name that was given decides: what a link points to may be called anything
    suffix = Path(source.path).suffix.lower()
    if suffix == ".safetensors":
        return _tensor_file(path, source, request)
    if suffix == ".jsonl":
        texts, labels = _json_lines(path, source.limit, request.task.type, request.context.byte_count(_POINTER))
    elif suffix == ".txt":
        texts, labels = _text_lines(path, source.limit, request.context.byte_count(_POINTER)), None
    else:
        raise Refusal(f"`{suffix}` is not read; take {', '.join(_SUFFIXES)}", pointer=_POINTER, code="wrong_format")
    if not texts:
        raise Refusal(f"{path.name} holds no text; give at least one line", pointer=_POINTER, code="empty_data")
    return text_stream(texts, labels, source.sequence_length, request, _POINTER)


def _tensor_file(path: OpenFile, source: DataFile, request: DataRequest) -> DataStream:
    """Rows of `inputs` (or of `input_ids` and its companions) with `targets`.

    Memory:
        Chunks of at most 64 MiB; the file is mapped, not loaded.
    """
    entries = read_header(path, _POINTER)
    inputs = sorted(name for name in entries if name != "targets")
    if not inputs:
        raise Refusal(f"{path.name} holds no `inputs`", pointer=_POINTER, code="empty_data")
    if "inputs" in entries and len(inputs) > 1:
        raise Refusal(
            f"{path.name} holds `inputs` and also {names([name for name in inputs if name != 'inputs'])}; "
            "give `inputs` and `targets`, or tensors named as the model's arguments and `targets`",
            pointer=_POINTER,
        )
    rows = _rows(path, entries)
    if source.limit is not None:
        rows = min(rows, source.limit)
    row_bytes = max(1, sum(entry.numbers * 8 // max(entry.shape[0], 1) for entry in entries.values()))
    # a row is copied into a batch
    request.context.byte_count(_POINTER).add(row_bytes)
    step = max(1, min(rows, _CHUNK_BYTES // row_bytes))

    def batches() -> Iterator[Chunk]:
        with safetensors.safe_open(path, framework="pt") as file:
            for start in range(0, rows, step):
                part = {name: file.get_slice(name)[start : min(start + step, rows)] for name in entries}
                targets = part.pop("targets", None)
                yield (model_inputs(part["inputs"], request.loaded) if "inputs" in part else part), targets

    def labels() -> Iterator[tuple[Tensor, Tensor]]:
        with safetensors.safe_open(path, framework="pt") as file:
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                yield file.get_slice("targets")[start:stop], torch.arange(start, stop)

    return DataStream(batches=batches, examples=rows, labels=labels if "targets" in entries else None)


def _rows(path: OpenFile, entries: dict[str, TensorEntry]) -> int:
    shapes = {name: entry.shape for name, entry in entries.items()}
    if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
        shown = "; ".join(f"`{name}` {list(shape)}" for name, shape in sorted(shapes.items())[:5])
        raise Refusal(
            f"{path.name}: tensors must agree on dimension 0, the examples; it holds {shown}",
            pointer=_POINTER,
            code="wrong_shape",
        )
    rows = next(iter(shapes.values()))[0]
    if rows == 0:
        raise Refusal(f"{path.name} holds no example; give at least one", pointer=_POINTER, code="empty_data")
    return rows


def _text_lines(path: OpenFile, limit: int | None, count: ByteCount) -> list[str]:
    texts = []
    for text in itertools.islice((line.strip() for _, line in _lines(path) if line.strip()), limit):
        count.add_value(text)
        texts.append(text)
    return texts


def _json_lines(path: OpenFile, limit: int | None, task: str, count: ByteCount) -> tuple[list[str], list[float] | None]:
    texts: list[str] = []
    labels: list[float] = []
    for number, line in _lines(path):
        if limit is not None and len(texts) >= limit:
            break
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
            text = row["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refusal(
                f"{path.name} line {number} is no JSON object with `text`", pointer=_POINTER, code="wrong_format"
            ) from error
        if not isinstance(text, str):
            raise Refusal(f"{path.name} line {number}: `text` must be a string", pointer=_POINTER, code="wrong_format")
        if not is_storable(text):
            raise Refusal(
                f"{path.name} line {number}: `text` holds half of a surrogate pair, which is not a character; "
                "write both halves, or the character itself",
                pointer=_POINTER,
                code="wrong_format",
            )
        if "label" in row:
            fault = label_fault(row["label"], task)
            if fault is not None:
                raise Refusal(f"{path.name} line {number}: `label` {fault}", pointer=_POINTER)
            count.add_value(row["label"])
            labels.append(read_label(row["label"], task))
        count.add_value(text)
        texts.append(text)
    if labels and len(labels) != len(texts):
        raise Refusal(
            f"{path.name}: {len(labels)} of {len(texts)} lines have a `label`; give all of them one, or none",
            pointer=_POINTER,
            code="ragged",
        )
    return texts, labels or None


def _lines(path: OpenFile) -> Iterator[tuple[int, str]]:
    """Numbered lines, each of bounded length."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > _MAX_LINE_BYTES:
                raise Refusal(f"{path.name} line {number} is longer than {_MAX_LINE_BYTES:,} bytes", pointer=_POINTER)
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise Refusal(f"{path.name} line {number} is not UTF-8 text", pointer=_POINTER) from error
