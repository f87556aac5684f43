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

from catalog.requests.inputs import HuggingFaceData, is_path
from worker.execution.data.labels import Labels
from worker.execution.data.stream import DataRequest, DataStream
from worker.execution.data.table_files import Table, is_untyped, read_columns, take_rows
from worker.execution.data.texts.table_texts import TableColumns, table_stream
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.refusal import Refusal, Unavailable, names

_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9][\w.\-]{0,95})?", re.ASCII)


def load(source: HuggingFaceData, request: DataRequest) -> DataStream:
    """Open the texts of one column, with labels from another if the document names it."""
    request.context.report("data", 0, None, "rows")
    columns = TableColumns(
        text=source.input_column,
        pair=source.pair_column,
        label=source.target_column,
        fields=("input_column", "pair_column", "target_column"),
        place="/data/id",
    )
    columns.require_pairs(request.task.type)
    place = _local(source, request)
    labels = columns.labels(request, untyped=place is not None and is_untyped(place, source.split))
    if place is not None:
        table = read_columns(place, source.split, columns.named, source.limit, labels, columns.place)
    else:
        table = _columns(_table(source, request), source, columns.named, labels)
    return table_stream(table, columns, labels, source.id, source.sequence_length)


def _local(source: HuggingFaceData, request: DataRequest) -> OpenFile | OpenFolder | None:
    """The file or folder that an id names; None for one of the hub."""
    # a name that is too long for a file is none
    if is_path(source.id) or os.access(source.id, os.F_OK):
        return request.context.open_path(source.id, "/data/id")
    return None


def _columns(
    table: Any,  # noqa: ANN401 - untyped library
    source: HuggingFaceData,
    columns: Mapping[str, str],
    labels: Labels,
) -> Table:
    there = list(table.column_names)
    count = labels.request.context.byte_count("/data/id")
    for field, column in columns.items():
        if column not in there:
            raise Refusal(f"`{column}` is not a column; there are {names(there, 20)}", pointer=f"/data/{field}")
    if source.target_column is not None:
        labels.name_classes(class_names(table.features[source.target_column]))
    rows = (table[place] for place in range(min(source.limit or len(table), len(table))))
    values = ([row[column] for column in columns.values()] for row in rows)
    return Table(columns=take_rows(values, columns, labels, count), there=tuple(there))


def class_names(feature: Any) -> list[str]:  # noqa: ANN401 - untyped library
    """Return the names of a column's classes by their numbers; none where it has none."""
    while not isinstance(feature, datasets.ClassLabel) and hasattr(feature, "feature"):
        # tags of words are a list of classes
        feature = feature.feature
    return list(feature.names or ()) if isinstance(feature, datasets.ClassLabel) else []


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
