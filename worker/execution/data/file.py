"""A file of data: safetensors (`inputs`, `targets`), JSON lines (`text`, `label`) or lines of text."""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from catalog.requests.inputs import DataFile
from worker.execution.data.byte_count import ByteCount
from worker.execution.data.forward_inputs import model_inputs, require_arguments
from worker.execution.data.labels import label_fault, read_label
from worker.execution.data.request import DataRequest
from worker.execution.data.stream import Chunk, DataStream
from worker.execution.data.texts.tagged_words import TAGS, WORDS, TaggedWords, read_tagged_words, tagged_stream
from worker.execution.data.texts.text import Text, text_stream
from worker.execution.data.texts.text_rows import LABELLED, TextFields, choose_fields, list_unused
from worker.execution.files.open_files import OpenFile
from worker.execution.files.safetensors_header import TensorEntry, read_header
from worker.execution.refusal import Refusal, is_storable, names, unique_keys

_POINTER = "/data/path"
_MAX_LINE_BYTES = 2**20
_CHUNK_BYTES = 64 * 2**20
_MOST_FIELDS = 1_000
_SUFFIXES = (".safetensors", ".jsonl", ".txt")


def load(source: DataFile, request: DataRequest) -> DataStream:
    """Open a file by its suffix: `.safetensors`, `.jsonl` or `.txt`."""
    path = request.context.open_path(source.path, _POINTER)
    if not isinstance(path, OpenFile):
        raise Refusal(f"{source.path} is a folder; give a file", pointer=_POINTER)
    # the name that was given decides: what a link points to may be called anything
    suffix = Path(source.path).suffix.lower()
    if suffix == ".safetensors":
        return _tensor_file(path, source, request)
    if suffix == ".jsonl" and request.task.type == "token_classification":
        return tagged_stream(_tagged_lines(path, source.limit, request), source.sequence_length, request, _POINTER)
    if suffix == ".jsonl":
        texts, labels = _json_lines(path, source.limit, request)
    elif suffix == ".txt":
        texts, labels = list[Text](_text_lines(path, source.limit, request.context.byte_count(_POINTER))), None
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
    require_arguments(inputs, request.loaded)
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


def _json_lines(path: OpenFile, limit: int | None, request: DataRequest) -> tuple[list[Text], list[float] | None]:
    """The texts of a file's lines, or pairs of them, with their labels; what else a line holds is listed."""
    task, count = request.task.type, request.context.byte_count(_POINTER)
    texts: list[Text] = []
    labels: list[float] = []
    fields: TextFields | None = None
    there: dict[str, None] = {}
    written = ((number, line) for number, line in _lines(path) if line.strip())
    for number, line in itertools.islice(written, limit):
        where = f"{path.name} line {number}"
        row = _object(line, where, "`text`")
        if fields is None or not there.keys() >= row.keys():
            there.update(dict.fromkeys(row))
            fields = _chosen(there, fields, task, where)
        text = _text(row, fields.text, where)
        texts.append(text if fields.pair is None else (text, _text(row, fields.pair, where)))
        count.add_value("".join(texts[-1]))
        if fields.label in row:
            labels.append(_label(row[fields.label], fields.label, task, where))
            count.add_value(labels[-1])
    if labels and len(labels) != len(texts):
        raise _ragged(f"{path.name}: {len(labels)} of {len(texts)} lines have a `label`; give all of them one, or none")
    if fields is not None:
        label = fields.label if task in LABELLED else None
        list_unused(there, (fields.text, fields.pair, label), path.name, request.context)
    return texts, labels or None


def _tagged_lines(path: OpenFile, limit: int | None, request: DataRequest) -> list[TaggedWords]:
    """The words of a file's lines with their tags; what else a line holds is listed."""
    texts, there, count = [], dict[str, None](), request.context.byte_count(_POINTER)
    written = ((number, line) for number, line in _lines(path) if line.strip())
    for number, line in itertools.islice(written, limit):
        where = f"{path.name} line {number}"
        row = _object(line, where, f"`{WORDS}` and `{TAGS}`")
        texts.append(read_tagged_words(row, (WORDS, TAGS), where, _POINTER))
        there.update(dict.fromkeys(itertools.islice(row, _MOST_FIELDS)))
        for value in (*texts[-1].words, *texts[-1].tags):
            count.add_value(value)
    if not texts:
        raise Refusal(f"{path.name} holds no text; give at least one line", pointer=_POINTER, code="empty_data")
    list_unused(there, (WORDS, TAGS), path.name, request.context)
    return texts


def _object(line: str, where: str, wanted: str) -> dict[str, Any]:
    try:
        row = json.loads(line, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        why = f": {error}" if str(error).startswith("two fields") else ""
        raise Refusal(f"{where} is no JSON object with {wanted}{why}", pointer=_POINTER, code="wrong_format") from error
    if not isinstance(row, dict):
        raise Refusal(f"{where} is no JSON object with {wanted}", pointer=_POINTER, code="wrong_format")
    return row


def _chosen(there: Mapping[str, None], before: TextFields | None, task: str, where: str) -> TextFields:
    """The fields that are read, where one more line shows what there is."""
    if len(there) > _MOST_FIELDS:
        raise Refusal(f"{where}: more than {_MOST_FIELDS} fields", pointer=_POINTER, code="wrong_format")
    try:
        chosen = choose_fields(tuple(there), task, _POINTER)
    except Refusal as refusal:
        what = " is no JSON object with `text`" if refusal.code == "wrong_format" else ""
        raise Refusal(f"{where}{what}: {refusal.message}", pointer=_POINTER, code=refusal.code) from refusal
    if before is not None and (chosen.text, chosen.pair) != (before.text, before.pair):
        raise _ragged(f"{where} has `{chosen.pair or chosen.text}`, and lines before it have not; give every line one")
    return chosen


def _label(label: Any, name: str, task: str, where: str) -> float:  # noqa: ANN401 - decoded from JSON
    fault = label_fault(label, task)
    if fault is not None:
        raise Refusal(f"{where}: `{name}` {fault}", pointer=_POINTER)
    return read_label(label, task)


def _ragged(message: str) -> Refusal:
    return Refusal(message, pointer=_POINTER, code="ragged")


def _text(row: dict[str, Any], name: str, where: str) -> str:
    text = row.get(name)
    if name not in row:
        raise _ragged(f"{where} has no `{name}`, and others have; give every line one")
    if not isinstance(text, str):
        raise Refusal(f"{where}: `{name}` must be a string", pointer=_POINTER, code="wrong_format")
    if not is_storable(text):
        raise Refusal(
            f"{where}: `{name}` holds half of a surrogate pair, which is not a character; "
            "write both halves, or the character itself",
            pointer=_POINTER,
            code="wrong_format",
        )
    return text


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
