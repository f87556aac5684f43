"""A data set of the Hugging Face hub, or a local folder or file in its formats: parquet, JSON or CSV only.

No loading script ever runs: the library's current versions have none, and only data files of the
three formats are named to it.
"""

import re
from pathlib import Path
from typing import Any

import datasets
import datasets.exceptions
import huggingface_hub.errors

from catalog.inputs import HuggingFaceData
from worker.execution.data.labels import label_fault, read_label
from worker.execution.data.request import DataRequest
from worker.execution.data.stream import DataStream
from worker.execution.data.text import text_stream
from worker.execution.refusal import Refusal, Unavailable

_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9][\w.\-]{0,95})?", re.ASCII)
_READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def load(source: HuggingFaceData, request: DataRequest) -> DataStream:
    """Open the texts of one column, with labels from another if the document names it.

    Args:
        source: The data's block of the document.
        request: The model, the task and the batches that are wanted.

    Returns:
        The stream of token ids.

    Raises:
        Refusal: If the data set is not there, or a column is missing, empty or of another type.
        Unavailable: If the hub does not answer.
    """
    datasets.disable_progress_bars()
    request.context.report("data", 0, None, "rows")
    table = _table(source, request)
    columns = list(table.column_names)
    for field, column in (("input_column", source.input_column), ("target_column", source.target_column)):
        if column is not None and column not in columns:
            raise Refusal(f"`{column}` is not a column; there are {', '.join(columns[:20])}", pointer=f"/data/{field}")
    if source.limit is not None:
        table = table.select(range(min(source.limit, len(table))))
    if not len(table):
        raise Refusal("the data set holds no row", pointer="/data/id", code="empty_data")
    texts = list(table[source.input_column])
    wrong = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None:
        raise Refusal(
            f"row {wrong} holds {type(texts[wrong]).__name__}, not text; tensors come from `source: file`",
            pointer="/data/input_column",
            code="wrong_type",
        )
    labels = _labels(table, source, request) if source.target_column is not None else None
    return text_stream(texts, labels, source.sequence_length, request, "/data")


def _labels(table: Any, source: HuggingFaceData, request: DataRequest) -> list[float]:  # noqa: ANN401 - untyped library
    labels = list(table[source.target_column])
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
    local = Path(source.id).expanduser()
    if local.is_absolute() or source.id.startswith(("./", "../", "~")) or local.exists():
        return _local_table(around.allowed_path(source.id, "/data/id"), source, around.store)
    if not _ID.fullmatch(source.id):
        raise Refusal("is not a data set id; write `owner/name`, or a path", pointer="/data/id")
    config = datasets.DownloadConfig(local_files_only=around.offline, cache_dir=str(around.store / "datasets"))
    try:
        return datasets.load_dataset(
            source.id,
            source.name,
            split=source.split,
            revision=source.revision,
            cache_dir=str(around.store / "datasets"),
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


def _local_table(path: Path, source: HuggingFaceData, store: Path) -> Any:  # noqa: ANN401 - untyped library
    files = (
        [path]
        if path.is_file()
        else sorted(file for file in path.rglob("*") if file.suffix in _READERS and source.split in file.stem)
        or sorted(file for file in path.rglob("*") if file.suffix in _READERS)
    )
    suffixes = {file.suffix for file in files}
    if not files or suffixes - _READERS.keys() or len({_READERS[suffix] for suffix in suffixes}) != 1:
        raise Refusal(
            f"{path.name} must hold data files of one kind: {', '.join(_READERS)}",
            pointer="/data/id",
            code="wrong_format",
        )
    try:
        return datasets.load_dataset(
            _READERS[files[0].suffix],
            data_files=[str(file) for file in files],
            split="train",  # the reader's own name for all the files it was given
            cache_dir=str(store / "datasets"),
        )
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise Refusal(
            f"{path.name} cannot be read: {str(cause)[:300]}", pointer="/data/id", code="wrong_format"
        ) from error
