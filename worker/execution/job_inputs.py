"""The inputs of a job: its model and data by the sources that the document names, or factors in their place."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from catalog.inputs import BuiltinModel
from catalog.job import JobDocument
from engine.workspace import Artifacts
from worker.execution.assignment import Assignment
from worker.execution.data.request import DataRequest
from worker.execution.data.stream import DataStream
from worker.execution.data.validation import validate_chunks
from worker.execution.files.artifact_files import find_factors
from worker.execution.files.gradient_file import load_gradient
from worker.execution.files.matrix_file import MatrixFile
from worker.execution.files.open_files import OpenFolder
from worker.execution.loaded_model import LoadedModel
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal
from worker.execution.resolve import resolve

MODEL_SOURCES = {
    "builtin": "worker.execution.models.builtin:load",
    "directory": "worker.execution.models.checkpoint:load",
    "factory": "worker.execution.models.factory:load",
    "huggingface": "worker.execution.models.huggingface:load",
}
DATA_SOURCES = {
    "builtin": "worker.execution.data.builtin:load",
    "factory": "worker.execution.data.factory:load",
    "file": "worker.execution.data.file:load",
    "huggingface": "worker.execution.data.huggingface:load",
    "synthetic": "worker.execution.data.synthetic:load",
}


def load_model(document: JobDocument, context: LoaderContext) -> LoadedModel:
    """Load the model that the document names.

    Args:
        document: The job document.
        context: The loaders' rules, folders and reports.

    Returns:
        The model, on the host, with its provenance.

    Raises:
        Refusal: If no loader serves the document's source.
    """
    source: Any = document.model
    loader = MODEL_SOURCES.get(source.source)
    if loader is None:
        raise Refusal(
            f"`source: {source.source}` is not served here; take one of {', '.join(MODEL_SOURCES)}",
            pointer="/model/source",
            code="unsupported_source",
        )
    context.report("model", 0, None, "models")
    loaded: LoadedModel = resolve(loader)(source, document.task, context)
    context.checkpoint()
    return loaded


def load_data(document: JobDocument, loaded: LoadedModel, context: LoaderContext) -> DataStream:
    """Open the data that the document names.

    Args:
        document: The job document.
        loaded: The model, whose inputs and outputs the data must fit.
        context: The loaders' rules, folders and reports.

    Returns:
        The stream of batches; each batch is validated as it is read.

    Raises:
        Refusal: If no loader serves the document's source, or the document has no task.
    """
    source: Any = document.data
    loader = DATA_SOURCES.get(source.source)
    if loader is None or document.task is None:
        raise Refusal(
            f"`source: {source.source}` is not served here; take one of {', '.join(DATA_SOURCES)}",
            pointer="/data/source",
            code="unsupported_source",
        )
    context.report("data", 0, None, "sources")
    request = DataRequest(
        task=document.task,
        loaded=loaded,
        batch_size=document.collection.batch_size,
        seed=document.collection.seed,
        context=context,
    )
    stream: DataStream = resolve(loader)(source, request)
    context.checkpoint()
    return validate_chunks(stream, loaded, "/data")


def try_before_training(document: JobDocument, context: LoaderContext) -> None:
    """Refuse data that a builtin model cannot take or has no classes for, before the model is trained.

    Args:
        document: The job document; a model that needs no training is left to the engine's dry run.
        context: The loaders' rules, folders and reports.

    Raises:
        Refusal: If the data cannot be opened, or not for this model.
        EngineError: If the model and the data's first example, or its labels, do not fit each other.
    """
    source = document.model
    if not isinstance(source, BuiltinModel) or document.task is None or context.shapes_only:
        return
    make = resolve("worker.execution.models.builtin:untrained")(source.name, context.store)
    if make is None:
        return
    # the loaders have their say in the log when the job itself loads
    quiet = replace(context, log=lambda _level, _message: None)
    bare = load_model(document, replace(quiet, shapes_only=True))
    resolve("worker.execution.models.trial_run:try_untrained")(make, load_data(document, bare, quiet), document.task)
    context.checkpoint()


def open_factors(document: JobDocument, assignment: Assignment, context: LoaderContext) -> Artifacts:
    """Open the factors of an earlier job, or a single matrix, in place of a model and data.

    Args:
        document: The job document, with `factors`.
        assignment: The assignment; its `factors_path`, if set, is the folder that the parent laid out.
        context: The loaders' rules for paths.

    Returns:
        The stored factors, for reading only.

    Raises:
        Refusal: If the document names a job of the service in a foreground run, a tensor in a folder, or a single
            matrix for another analysis than `reconstruction`.
    """
    if assignment.factors_path is not None:
        return find_factors(OpenFolder.by_itself(assignment.factors_path, "/factors"), "/factors", context.most_bytes)
    reference = document.factors
    path = None if reference is None else reference.path
    if reference is None or path is None:
        raise Refusal(
            "names a job of the service; in the foreground give `factors: {path: FOLDER}`", pointer="/factors/job"
        )
    found = context.open_path(path, "/factors/path")
    if isinstance(found, OpenFolder):
        if reference.tensor is not None:
            raise Refusal("names a matrix in a file, and `path` is a folder; leave it out", pointer="/factors/tensor")
        return find_factors(found, "/factors/path", context.most_bytes)
    if document.kinds != ("reconstruction",):
        raise Refusal(
            "is a file, and a single matrix is for `reconstruction`; take `kind: reconstruction` alone",
            pointer="/factors/path",
        )
    return MatrixFile(found, reference.tensor, context.log, context.most_bytes)


def open_gradient(document: JobDocument, context: LoaderContext) -> dict[str, Tensor] | None:
    """Read the gradient that the document names in place of that of its data.

    Args:
        document: The job document.
        context: The loaders' rules for paths.

    Returns:
        Tensors by parameter; None where it names none, or a plan is made of shapes alone.

    Raises:
        Refusal: If the file cannot be read, or holds no gradient.
    """
    given = None
    if "natural_gradient" in document.kinds:
        given = getattr(document, "natural_gradient").gradient  # noqa: B009 - a block that the menu adds
    if given is None or context.shapes_only:
        return None
    gradient = load_gradient(given.path, context)
    context.checkpoint()
    return gradient
