"""Extension: a finished collection, to which the examples of a job's data are added.

The examples of the new data follow those of the earlier job: an index is that of the new data plus the first one that
the earlier examples leave free. Both sets of sums are merged, the earlier one first, as pieces of a divided job are.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from catalog.frames import Finished
from catalog.requests.assignment import Assignment
from catalog.requests.extending import completed
from catalog.requests.job import JobDocument
from engine.artifacts import Artifacts
from engine.factors.factor_files import read_factors
from engine.factors.factor_set import CountedExamples
from engine.measurement.piece_storage import store_piece
from engine.model.batches import make_batches
from engine.workspace import DataPart, JobOptions, JobResults, Workspace
from worker.execution.data.stream import Chunk, DataStream
from worker.execution.files.artifact_files import ArtifactFiles, StoredFactors, find_factors
from worker.execution.files.open_files import OpenFolder
from worker.execution.input_digests import composed_digest
from worker.execution.loader_context import LoaderContext
from worker.execution.pieces.data_extent import measure_extent
from worker.execution.refusal import Refusal

Parse = Callable[[Mapping[str, Any]], JobDocument]
POINTER = "/extends"
_FOLDER = "extension"
"""Folder of the new data's factors below the scratch folder."""
_MOST_LINKS = 1000
_JOB = "job.json"
_NO_SUMS = ("ema_decay", "nested", "ekfac")
"""Options whose results depend on which examples come last, on how many there are, or on all of them at once."""


@dataclass(frozen=True, kw_only=True)
class Extended:
    """The job that is extended."""

    document: JobDocument
    """The document of the new job with model, task, collection and woodbury of the earlier one in it."""
    factors: StoredFactors
    """The factors of the earlier job."""
    counted: CountedExamples
    """The examples that they are over."""
    model_sha256: str | None
    """Digest of the model that the earlier job measured, where it says so."""
    data_sha256: str | None
    """Digest of its data, where it says so."""


def open_extended(
    document: JobDocument,
    assignment: Assignment,
    context: LoaderContext,
    parse: Callable[[Mapping[str, Any]], JobDocument],
) -> Extended:
    """Open the job that a document extends, and complete the document by it."""
    folder, described = _locate(document, assignment, context)
    source = parse(_root(described, context))
    if source.model is None or source.task is None:
        raise Refusal("names a job over stored factors, which measured no model; name one that did", pointer=POINTER)
    factors = find_factors(folder, POINTER, context.most_bytes)
    whole = read_factors(factors)
    for name in _NO_SUMS:
        if getattr(source.collection, name):
            raise Refusal(
                f"names a job with `collection.{name}`, which is not a sum that examples can be added to; collect all "
                "of the data in one job",
                pointer=POINTER,
                code="not_extensible",
            )
    if whole.counted is None:
        raise Refusal(
            "names factors that do not say over which examples they are, as an earlier version kept them; collect them "
            "again",
            pointer=POINTER,
            code="not_extensible",
        )
    unit = source.collection.batch_size * source.collection.update_freq
    if source.collection.update_freq > 1 and whole.counted.count % unit:
        raise Refusal(
            f"names a job over {whole.counted.count} examples with `collection.update_freq: "
            f"{source.collection.update_freq}`: in one run over all the data other batches would enter, as {unit} "
            "examples do not divide them; collect all of the data in one job",
            pointer=POINTER,
            code="not_extensible",
        )
    return Extended(
        document=completed(document, source),
        factors=factors,
        counted=whole.counted,
        model_sha256=described.get("model_sha256"),
        data_sha256=described.get("data_sha256"),
    )


def collecting(options: JobOptions) -> JobOptions:
    """Return the options of a job that collects factors and stores them, and analyses nothing."""
    return replace(options, kinds=("factors",), keep=("factors",), decomposition="none", params={})


def enter_extension(extended: Extended, data: DataStream, workspace: Workspace) -> DataStream:
    """Put the new data behind those of the earlier job."""
    first = extended.counted.runs[-1].end
    collection = extended.document.collection

    def batches() -> Iterator[Chunk]:
        for batch in make_batches(data.batches(), collection.batch_size):
            yield batch.inputs, batch.targets, batch.index + first

    def labels() -> Iterator[tuple[Tensor, Tensor]]:
        for targets, index in () if data.labels is None else data.labels():
            yield targets, index + first

    count = measure_extent(data, collection, workspace.ports.raise_if_cancelled).examples
    added = DataStream(batches=batches, examples=count, labels=None if data.labels is None else labels)
    begin, inputs = extended.counted.count, workspace.inputs
    inputs.batches, inputs.examples, inputs.labels = added.batches, added.examples, added.labels
    inputs.part = DataPart(begin=begin, end=begin + count, examples=begin + count, batches=added.batches)
    return added


def collect_extension(extended: Extended, model_sha256: str, scratch: Path, workspace: Workspace) -> None:
    """Collect the new data, and give the workspace both sets in place of model and data."""
    place = ArtifactFiles(scratch / _FOLDER, None)
    if extended.model_sha256 is not None and extended.model_sha256 != model_sha256:
        raise Refusal(
            f"names a job that measured a model of digest {extended.model_sha256}, and its document gives one of "
            f"{model_sha256} now; a checkpoint must be the same, and a factory return the same weights every time",
            pointer=POINTER,
            code="model_differs",
        )
    collecting_workspace = replace(
        workspace,
        options=collecting(workspace.options),
        ports=replace(workspace.ports, artifacts=place, cache=None),
        results=JobResults(),
    )
    store_piece(collecting_workspace)
    pieces: tuple[Artifacts, ...] = (extended.factors, place)
    inputs = workspace.inputs
    inputs.model = inputs.batches = inputs.examples = inputs.labels = inputs.part = None
    inputs.stored_pieces = pieces


def extended_digests(finished: Finished, extended: Extended) -> Finished:
    """Return the last frame of an extension with the digests of all the examples."""
    known = extended.data_sha256 is not None and finished.data_sha256 is not None
    return replace(
        finished,
        data_sha256=composed_digest((extended.data_sha256, finished.data_sha256)) if known else None,
        examples=extended.counted.count + (finished.examples or 0),
    )


def _locate(
    document: JobDocument, assignment: Assignment, context: LoaderContext
) -> tuple[OpenFolder, Mapping[str, Any]]:
    """The folder of the earlier job's factors, and what is known of that job: its document and digests."""
    if assignment.extends is not None:
        return OpenFolder.by_itself(assignment.extends.path, POINTER), {
            "document": assignment.extends.document,
            "model_sha256": assignment.extends.model_sha256,
            "data_sha256": assignment.extends.data_sha256,
        }
    path = None if document.extends is None else document.extends.path
    if path is None:
        raise Refusal(
            "names a job of the service; in the foreground give `extends.path: FOLDER`", pointer=f"{POINTER}/job"
        )
    return _run_at(path, context)


def _run_at(path: str, context: LoaderContext) -> tuple[OpenFolder, Mapping[str, Any]]:
    pointer = f"{POINTER}/path"
    folder = context.open_path(path, pointer)
    file = folder.file(_JOB) if isinstance(folder, OpenFolder) else None
    if not isinstance(folder, OpenFolder) or file is None:
        raise Refusal(
            f"holds no {_JOB}; give the output folder of a run with `keep: [factors]`",
            pointer=pointer,
            code="not_found",
        )
    try:
        described = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{_JOB} is not valid JSON", pointer=pointer, code="broken_factors") from error
    if not isinstance(described, dict) or not isinstance(described.get("document"), dict):
        raise Refusal(f"{_JOB} is not that of a run; give another folder", pointer=pointer, code="broken_factors")
    if described.get("state") != "succeeded":
        raise Refusal(f"names a run that is {described.get('state')}; give one that has succeeded", pointer=pointer)
    return folder, described


def _root(described: Mapping[str, Any], context: LoaderContext) -> Mapping[str, Any]:
    """The document at the beginning of a chain of extensions: it says what all of them were collected with."""
    for _ in range(_MOST_LINKS):
        document: Mapping[str, Any] = described["document"]
        extends = document.get("extends")
        if extends is None:
            return document
        path = extends.get("path") if isinstance(extends, dict) else None
        if not isinstance(path, str):
            break
        described = _run_at(path, context)[1]
    raise Refusal(
        "extends a job that extends another, and so on to none that says what was collected; name the first one's "
        "folder, or collect anew",
        pointer=POINTER,
    )
