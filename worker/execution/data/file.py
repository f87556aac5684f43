"""A file of data: safetensors (`inputs`, `targets`), columns (JSON lines, CSV, parquet) or lines of text."""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from catalog.record import plain
from catalog.requests.data_sources import DataFile, FileOptions, UploadedData
from engine.model.examples import scale_pixels
from worker.execution.data.byte_count import ByteCount
from worker.execution.data.forward_inputs import model_inputs, require_arguments
from worker.execution.data.labels import Labels
from worker.execution.data.stream import Chunk, DataRequest, DataStream
from worker.execution.data.table_files import column_names, is_untyped, read_columns
from worker.execution.data.texts.table_texts import TableColumns, describe_columns, table_stream
from worker.execution.data.texts.tagged_words import (
    TAGS,
    WORDS,
    TaggedWords,
    read_tagged_words,
    tag_words,
    tagged_stream,
)
from worker.execution.data.texts.text import Text, text_stream
from worker.execution.data.texts.text_rows import (
    LABELLED,
    Rival,
    TextFields,
    choose_fields,
    find_rivals,
    list_unused,
    require_one_reading,
    require_text,
)
from worker.execution.files.open_files import OpenFile
from worker.execution.files.safetensors_header import TensorEntry, read_header, read_rows
from worker.execution.refusal import Refusal, names, unique_keys

_POINTER = "/data/path"
_MAX_LINE_BYTES = 2**20
_CHUNK_BYTES = 16 * 2**20
_MOST_FIELDS = 1_000
_SUFFIXES = (".safetensors", ".jsonl", ".csv", ".parquet", ".txt")
_IMAGES, _LABELS = "images", "labels"
"""Tensors of a file of images, as `docs/few-shot.md` makes it."""


def load(source: DataFile, request: DataRequest) -> DataStream:
    """Open a file by its suffix."""
    path = request.context.open_path(source.path, _POINTER)
    if not isinstance(path, OpenFile):
        raise Refusal(f"{source.path} is a folder; give a file", pointer=_POINTER)
    # the name that was given decides: what a link points to may be called anything
    return _open(path, Path(source.path).suffix.lower(), source, request)


def load_uploaded(source: UploadedData, request: DataRequest) -> DataStream:
    """Open the file that the parent has laid out."""
    folder = request.context.upload(request.block)
    (path,) = (file for file in map(folder.file, folder.names()) if file is not None)
    try:
        return _open(path, path.suffix, source, request)
    except Refusal as refused:
        if refused.pointer == _POINTER:
            refused.pointer = "/data/id"  # an upload has no path
        raise


def _open(path: OpenFile, suffix: str, source: FileOptions, request: DataRequest) -> DataStream:
    if suffix == ".safetensors":
        return _tensor_file(path, source, request)
    if suffix in (".csv", ".parquet"):
        return _table(path, source, request)
    if suffix == ".jsonl" and request.task.type == "token_classification":
        return tagged_stream(_tagged_lines(path, source, request), source.sequence_length, request, _POINTER)
    if suffix == ".jsonl":
        texts, labels = _json_lines(path, source, request)
    elif suffix == ".txt":
        texts, labels = list[Text](_text_lines(path, source.limit, request.context.byte_count(_POINTER))), None
    else:
        raise Refusal(f"`{suffix}` is not read; take {', '.join(_SUFFIXES)}", pointer=_POINTER, code="wrong_format")
    if not texts:
        raise Refusal(f"{path.name} holds no text; give at least one line", pointer=_POINTER, code="empty_data")
    return text_stream(texts, labels, source.sequence_length, request, _POINTER)


def _table(path: OpenFile, source: FileOptions, request: DataRequest) -> DataStream:
    """Texts and labels of columns."""
    names, task = column_names(path, request.context.byte_count(_POINTER)), request.task.type
    if task == "token_classification":
        fields = TextFields(text=source.text_key or WORDS, pair=source.pair_key, label=source.label_key or TAGS)
    else:
        fields = choose_fields(names, task, _POINTER, source)
    columns = TableColumns(
        text=fields.text,
        pair=fields.pair,
        label=fields.label if task in (*LABELLED, "token_classification") else None,
        fields=("text_key", "pair_key", "label_key"),
        place=_POINTER,
    )
    columns.require_pairs(task)
    rivals = find_rivals(names, fields, task, source) if task != "token_classification" else []
    _require_columns_agree(path, rivals, source, request)
    labels = columns.labels(request, untyped=is_untyped(path, ""))
    table = read_columns(path, "", columns.named, source.limit, labels, _POINTER)
    return table_stream(table, columns, labels, path.name, source.sequence_length)


def _require_columns_agree(path: OpenFile, rivals: list[Rival], source: FileOptions, request: DataRequest) -> None:
    """Refuse a table with two columns of usual names for one thing that differ in a row."""
    for rival in rivals:
        # neither field is one of labels, so that the values come as they are
        columns, labels = {"read": rival.read, "other": rival.other}, Labels(column="", request=request, pointer="")
        try:
            table = read_columns(path, "", columns, source.limit, labels, _POINTER)
        except Refusal as refusal:
            # a column of bytes or dates is not another reading; a broken file is refused when it is read for the job
            if refusal.code == "wrong_format":
                continue
            raise
        for number, pair in enumerate(zip(*table.columns, strict=True)):
            row = dict(zip(columns.values(), pair, strict=True))
            require_one_reading(row, [rival], f"{path.name} row {number}", _POINTER)


def _tensor_file(path: OpenFile, source: FileOptions, request: DataRequest) -> DataStream:
    """Rows of `inputs`, `images`, or `input_ids` and companions, with `targets`, in chunks of at most 16 MiB."""
    entries = read_header(path, _POINTER)
    only, targets = _tensor_names(path, entries, request)
    pixels = source.pixels
    if pixels is not None:
        _require_images(path, entries.get(only), only)
        request.context.describe("pixels", plain(pixels))
    rows = _rows(path, entries)
    if source.limit is not None:
        rows = min(rows, source.limit)
    row_bytes = max(1, sum(entry.numbers * 8 // max(entry.shape[0], 1) for entry in entries.values()))
    # a row is copied into a batch
    request.context.byte_count(_POINTER).add(row_bytes)
    step = max(1, min(rows, _CHUNK_BYTES // row_bytes))

    def batches() -> Iterator[Chunk]:
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            part = {name: read_rows(path, entry, start, stop, _POINTER) for name, entry in entries.items()}
            given = part.pop(targets, None)
            if pixels is not None:
                part[only] = scale_pixels(part[only], pixels)
            yield (model_inputs(part[only], request.loaded) if only in part else part), given

    def labels() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield read_rows(path, entries[targets], start, stop, _POINTER), torch.arange(start, stop)

    return DataStream(batches=batches, examples=rows, labels=labels if targets in entries else None)


def _tensor_names(path: OpenFile, entries: Mapping[str, TensorEntry], request: DataRequest) -> tuple[str, str]:
    """The names of the inputs, where they are one tensor, and of the targets."""
    if _IMAGES in entries and entries.keys() <= {_IMAGES, _LABELS}:
        return _IMAGES, _LABELS
    inputs = sorted(name for name in entries if name != "targets")
    if not inputs:
        held = f"only {names(sorted(entries))}" if entries else "and no other tensor"
        raise Refusal(
            f"{path.name} holds no `inputs`, {held}; save the inputs beside them as `inputs`, or under the names "
            "of the model's arguments",
            pointer=_POINTER,
            code="empty_data",
        )
    if "inputs" in entries and len(inputs) > 1:
        raise Refusal(
            f"{path.name} holds `inputs` and also {names([name for name in inputs if name != 'inputs'])}; "
            "give `inputs` and `targets`, or tensors named as the model's arguments and `targets`",
            pointer=_POINTER,
        )
    require_arguments(inputs, request.loaded)
    return "inputs", "targets"


def _require_images(path: OpenFile, entry: TensorEntry | None, name: str) -> None:
    if entry is None or entry.dtype != "U8":
        shown = "holds none" if entry is None else f"holds `{name}` of type {entry.dtype}"
        raise Refusal(
            f"are of uint8 images, and {path.name} {shown}; leave them out, or save `images` as uint8",
            pointer="/data/pixels",
            code="wrong_type",
        )


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
    empty = [name for name, entry in entries.items() if not entry.numbers]
    if empty:
        raise Refusal(
            f"{path.name}: `{empty[0]}` of shape {list(shapes[empty[0]])} holds no numbers; give each example some",
            pointer=_POINTER,
            code="empty_data",
        )
    return rows


def _text_lines(path: OpenFile, limit: int | None, count: ByteCount) -> list[str]:
    texts = []
    count.allow_file(path)
    for text in itertools.islice((line.strip() for _, line in _lines(path) if line.strip()), limit):
        count.add_value(text)
        texts.append(text)
    return texts


def _json_lines(path: OpenFile, source: FileOptions, request: DataRequest) -> tuple[list[Text], list[float] | None]:
    """The texts of a file's lines, or pairs of them, with their labels; what else a line holds is listed."""
    task, count = request.task.type, request.context.byte_count(_POINTER)
    count.allow_file(path)
    texts: list[Text] = []
    labels = Labels(column=source.label_key or "label", request=request, pointer=_POINTER)
    fields: TextFields | None = None
    rivals: list[Rival] = []
    there: dict[str, None] = {}
    written = ((number, line) for number, line in _lines(path) if line.strip())
    for number, line in itertools.islice(written, source.limit):
        where = f"{path.name} line {number}"
        row = _object(line, where, f"`{source.text_key or 'text'}`")
        if fields is None or not there.keys() >= row.keys():
            there.update(dict.fromkeys(row))
            fields = _chosen(there, fields, source, task, where)
            rivals = find_rivals(there, fields, task, source)
        require_one_reading(row, rivals, where, _POINTER)
        text = _text(row, fields.text, where)
        texts.append(text if fields.pair is None else (text, _text(row, fields.pair, where)))
        count.add_value("".join(texts[-1]))
        if task in LABELLED and fields.label in row:
            labels.column = fields.label
            labels.add(row[fields.label], where)
            count.add_value(row[fields.label])
    if len(labels) and len(labels) != len(texts):
        raise _ragged(
            f"{path.name}: {len(labels)} of {len(texts)} lines have a `{labels.column}`; give all of them one, or none"
        )
    if fields is not None:
        label = fields.label if task in LABELLED else None
        list_unused(there, (fields.text, fields.pair, label), path.name, request.context)
        describe_columns(fields.text, fields.pair, label, request)
    return texts, labels.numbers() if len(labels) else None


def _tagged_lines(path: OpenFile, source: FileOptions, request: DataRequest) -> list[TaggedWords]:
    """The words of a file's lines with their tags; what else a line holds is listed."""
    fields = (source.text_key or WORDS, source.label_key or TAGS)
    texts, there, count = [], dict[str, None](), request.context.byte_count(_POINTER)
    labels = Labels(column=fields[1], request=request, pointer=_POINTER, code="wrong_type")
    count.allow_file(path)
    written = ((number, line) for number, line in _lines(path) if line.strip())
    for number, line in itertools.islice(written, source.limit):
        where = f"{path.name} line {number}"
        row = _object(line, where, f"`{fields[0]}` and `{fields[1]}`")
        texts.append(read_tagged_words(row, fields, where, labels, count))
        there.update(dict.fromkeys(itertools.islice(row, _MOST_FIELDS)))
    if not texts:
        raise Refusal(f"{path.name} holds no text; give at least one line", pointer=_POINTER, code="empty_data")
    list_unused(there, fields, path.name, request.context)
    describe_columns(fields[0], None, fields[1], request)
    return tag_words(texts, labels)


def _object(line: str, where: str, wanted: str) -> dict[str, Any]:
    why = ""
    try:
        row = json.loads(line, object_pairs_hook=unique_keys)
        if isinstance(row, dict):
            return row
    except (ValueError, RecursionError) as error:
        why = f": {error}" if str(error).startswith("two fields") else ""
    raise Refusal(f"{where} is no JSON object with {wanted}{why}", pointer=_POINTER, code="wrong_format")


def _chosen(
    there: Mapping[str, None], before: TextFields | None, source: FileOptions, task: str, where: str
) -> TextFields:
    """The fields that are read, where one more line shows what there is."""
    if len(there) > _MOST_FIELDS:
        raise Refusal(f"{where}: more than {_MOST_FIELDS} fields", pointer=_POINTER, code="wrong_format")
    try:
        chosen = choose_fields(tuple(there), task, _POINTER, source)
    except Refusal as refusal:
        what = " is no JSON object with `text`" if refusal.code == "wrong_format" else ""
        raise Refusal(f"{where}{what}: {refusal.message}", pointer=refusal.pointer, code=refusal.code) from refusal
    if before is not None and (chosen.text, chosen.pair) != (before.text, before.pair):
        raise _ragged(f"{where} has `{chosen.pair or chosen.text}`, and lines before it have not; give every line one")
    if task in LABELLED and before is not None and before.label not in (None, chosen.label):
        raise _ragged(f"{where} has `{chosen.label}`, and lines before it have not; name the labels (`label_key`)")
    return chosen


def _ragged(message: str) -> Refusal:
    return Refusal(message, pointer=_POINTER, code="ragged")


def _text(row: dict[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise _ragged(f"{where} has no `{name}`, and others have; give every line one")
    return require_text(row[name], name, where, _POINTER)


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
