"""A data set of the Hugging Face hub, or a local folder or file in its formats: parquet, JSON or CSV only.

No loading script ever runs: the library's current versions have none, and only data files of the
three formats are named to it.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import datasets.exceptions
import huggingface_hub.errors

from catalog.requests.inputs import HuggingFaceData
from worker.execution.data.labels import label_fault, read_label
from worker.execution.data.request import DataRequest
from worker.execution.data.stream import DataStream
from worker.execution.data.table_files import Table, read_columns
from worker.execution.data.texts.tagged_words import read_tagged_words, tagged_stream
from worker.execution.data.texts.text import Text, text_stream
from worker.execution.data.texts.text_rows import (
    LABELLED,
    list_unused,
    require_no_tensors,
    require_pair_named,
    require_pairs_make_sense,
)
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.refusal import Refusal, Unavailable, is_storable, names

_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9][\w.\-]{0,95})?", re.ASCII)


def load(source: HuggingFaceData, request: DataRequest) -> DataStream:
    """Open the texts of one column, with labels from another if the document names it."""
    request.context.report("data", 0, None, "rows")
    task = request.task.type
    fields = ("input_column", "pair_column", "target_column")
    columns = {field: getattr(source, field) for field in fields if getattr(source, field) is not None}
    if source.pair_column is not None:
        require_pairs_make_sense(source.input_column, source.pair_column, task, "/data/pair_column")
    place = _local(source, request)
    if place is not None:
        table = read_columns(place, source.split, columns, source.limit, request)
    else:
        table = _columns(_table(source, request), source, columns, request)
    found = dict(zip(columns, table.columns, strict=True))
    if not found["input_column"]:
        raise Refusal("the data set holds no row", pointer="/data/id", code="empty_data")
    if task == "token_classification":
        list_unused(table.there, (source.input_column, source.target_column), source.id, request.context)
        return _tagged(found, source, request)
    require_no_tensors(table.there, "/data/id")
    require_pair_named(table.there, source.input_column, source.pair_column, task)
    read = [source.input_column, source.pair_column, source.target_column if task in LABELLED else None]
    list_unused(table.there, read, source.id, request.context)
    labels = _labels(found["target_column"], source, request) if source.target_column is not None else None
    return text_stream(_texts(found), labels, source.sequence_length, request, "/data")


def _texts(found: Mapping[str, list[Any]]) -> list[Text]:
    """The texts, or pairs of them."""
    for field in ("input_column", "pair_column"):
        _require_texts(found.get(field, []), field)
    if "pair_column" not in found:
        return found["input_column"]
    return list(zip(found["input_column"], found["pair_column"], strict=True))


def _tagged(found: Mapping[str, list[Any]], source: HuggingFaceData, request: DataRequest) -> DataStream:
    """The words of one column with the tags of another."""
    if source.target_column is None:
        raise Refusal(
            "is null, and `token_classification` needs a column of tags; name it", pointer="/data/target_column"
        )
    if source.pair_column is not None:
        raise Refusal("has no place in `token_classification`; leave it out", pointer="/data/pair_column")
    fields, count = (source.input_column, source.target_column), request.context.byte_count("/data/id")
    texts = []
    for number, row in enumerate(zip(found["input_column"], found["target_column"], strict=True)):
        texts.append(read_tagged_words(dict(zip(fields, row, strict=True)), fields, f"row {number}", "/data"))
        for value in (*texts[-1].words, *texts[-1].tags):
            count.add_value(value)
    return tagged_stream(texts, source.sequence_length, request, "/data")


def _local(source: HuggingFaceData, request: DataRequest) -> OpenFile | OpenFolder | None:
    """The file or folder that an id names; None for one of the hub."""
    local = Path(source.id).expanduser()
    if local.is_absolute() or source.id.startswith(("./", "../", "~")) or local.exists():
        return request.context.open_path(source.id, "/data/id")
    return None


def _columns(
    table: Any,  # noqa: ANN401 - untyped library
    source: HuggingFaceData,
    columns: Mapping[str, str],
    request: DataRequest,
) -> Table:
    there = list(table.column_names)
    count = request.context.byte_count("/data/id")
    for field, column in columns.items():
        if column not in there:
            raise Refusal(f"`{column}` is not a column; there are {names(there, 20)}", pointer=f"/data/{field}")
    found: list[list[Any]] = [[] for _ in columns]
    for place in range(min(source.limit or len(table), len(table))):
        row = table[place]
        for values, column in zip(found, columns.values(), strict=True):
            count.add_value(row[column])
            values.append(row[column])
    return Table(columns=found, there=tuple(there))


def _require_texts(texts: list[Any], field: str) -> None:
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise Refusal(
                f"row {row} holds {type(text).__name__}, not text; tensors come from `source: file`",
                pointer=f"/data/{field}",
                code="wrong_type",
            )
        if not is_storable(text):
            raise Refusal(
                f"row {row} holds half of a surrogate pair, which is not a character",
                pointer=f"/data/{field}",
                code="wrong_format",
            )


def _labels(labels: list[Any], source: HuggingFaceData, request: DataRequest) -> list[float]:
    task = request.task.type
    for row, label in enumerate(labels):
        fault = label_fault(label, task)
        if fault is not None:
            raise Refusal(
                f"row {row}: `{source.target_column}` {fault}", pointer="/data/target_column", code="wrong_type"
            )
    return [read_label(label, task) for label in labels]


def _table(source: HuggingFaceData, request: DataRequest) -> Any:  # noqa: ANN401 - untyped library
    around = request.context
    datasets.disable_progress_bars()
    if not _ID.fullmatch(source.id):
        raise Refusal("is not a data set id; write `owner/name`, or a path", pointer="/data/id")
    cache = str(_own_cache(around.store / "datasets"))
    config = datasets.DownloadConfig(local_files_only=around.offline, cache_dir=cache)
    try:
        return datasets.load_dataset(
            source.id,
            source.name,
            split=source.split,
            revision=source.revision,
            cache_dir=cache,
            download_config=config,
        )
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError) as error:
        raise Refusal(
            f"{source.id} is not on the hub (or not public), and not in the store of this machine",
            pointer="/data/id",
            code="not_found",
        ) from error
    except (ConnectionError, TimeoutError, huggingface_hub.errors.OfflineModeIsEnabled) as error:
        if around.offline or isinstance(error, huggingface_hub.errors.OfflineModeIsEnabled):
            raise Refusal(
                f"{source.id} is not in the store of this machine, which does not reach the hub; "
                "download it, and give its path as `id`",
                pointer="/data/id",
                code="not_fetched",
            ) from error
        raise Unavailable(
            f"the hub did not answer for {source.id}; try again, or give a path as `id`",
            pointer="/data/id",
            code="hub_unreachable",
        ) from error
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        raise Refusal(
            f"{source.id} cannot be loaded: {str(error)[:300]}", pointer="/data", code="invalid_data"
        ) from error


def _own_cache(store: Path) -> Path:
    """The folder of prepared data sets, or one with links to its files where it is closed to this process's locks."""
    if os.access(store if store.exists() else store.parent, os.W_OK):
        return store
    own = Path(tempfile.mkdtemp(prefix="datasets-"))
    for place, folders, files in os.walk(store):
        inside = own / Path(place).relative_to(store)
        for name in folders:
            (inside / name).mkdir()
        for name in files:
            if not name.endswith(".lock"):
                (inside / name).symlink_to(Path(place, name))
    return own
