"""The inputs of a job: its model and data by the sources that the document names, or factors in their place.

A gradient of the caller's own is a safetensors file with a tensor for each trainable parameter. Its header is checked
before a tensor is read; names, shapes and values are held against the model's parameters by the
engine, which knows them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from catalog import ANALYSES
from catalog.requests.assignment import Assignment
from catalog.requests.inputs import BuiltinModel
from catalog.requests.job import JobDocument
from engine.analyses.fewshot.fewshot_model import weights_digest
from engine.artifacts import Artifacts
from engine.image_data import ImageData
from engine.memory.plan import readable_bytes
from engine.workspace import ModelInputs
from worker.execution.data.byte_count import no_room
from worker.execution.data.stream import DataRequest, DataStream
from worker.execution.data.validation import validate_chunks
from worker.execution.files.artifact_files import StoredFactors, find_factors
from worker.execution.files.matrix_file import MatrixFile
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.files.safetensors_header import ELEMENT_BYTES, read_header
from worker.execution.loaded_model import LoadedModel
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal
from worker.execution.resolve import resolve

POINTER = "/natural_gradient/gradient/path"
WEIGHTS = "/fewshot_training/weights"
_TYPES = ("F64", "F32", "F16", "BF16")
AGAINST = "/compare_curvature/against"
MODEL_SOURCES = {
    "builtin": "worker.execution.models.builtin:load",
    "directory": "worker.execution.models.checkpoint:load",
    "factory": "worker.execution.models.factory:load",
    "huggingface": "worker.execution.models.huggingface:load",
    "upload": "worker.execution.models.checkpoint:load_uploaded",
}
DATA_SOURCES = {
    "builtin": "worker.execution.data.builtin:load",
    "factory": "worker.execution.data.factory:load",
    "file": "worker.execution.data.file:load",
    "huggingface": "worker.execution.data.huggingface:load",
    "synthetic": "worker.execution.data.synthetic:load",
    "upload": "worker.execution.data.file:load_uploaded",
}
IMAGE_SOURCES = {
    "image_splits": "worker.execution.data.images.image_splits:load",
    "strokes": "worker.execution.data.images.strokes:load",
}


def load_gradient(path: str, context: LoaderContext) -> dict[str, Tensor]:
    """Return a gradient by parameter, on the host, of the shapes and dtypes that the file has.

    A file is refused that lies outside what the operator lists, is not a safetensors file, holds a tensor that is not
    of floating-point numbers, or has more bytes than are left to the job.
    """
    return _read_tensors(path, context, POINTER, "gradient", "trainable parameter")


def load_weights(path: str, context: LoaderContext) -> dict[str, Tensor]:
    """Read weights that a training begins with, by the same rules: finite, without BatchNorm's counts of batches."""
    weights = _read_tensors(path, context, WEIGHTS, "checkpoint", "parameter and buffer", ".num_batches_tracked")
    for name, tensor in weights.items():
        if not bool(tensor.isfinite().all()):
            raise Refusal(
                f"tensor `{name}` holds values that are NaN or Inf; take an intact checkpoint",
                pointer=WEIGHTS,
                code="non_finite_model",
            )
    return weights


def _read_tensors(
    path: str, context: LoaderContext, pointer: str, what: str, of: str, ignored: str | None = None
) -> dict[str, Tensor]:
    found = context.open_path(path, pointer)
    if isinstance(found, OpenFolder):
        raise Refusal(
            f"{found.name} is a folder; name a `.safetensors` file with a tensor for each {of}", pointer=pointer
        )
    entries = read_header(found, pointer)
    header = {name: entry for name, entry in entries.items() if ignored is None or not name.endswith(ignored)}
    other = next((name for name, entry in sorted(header.items()) if entry.dtype not in _TYPES), None)
    if other is not None:
        raise Refusal(
            f"`{other}` of {found.name} is of type {header[other].dtype}; a {what} is of one of {', '.join(_TYPES)}",
            pointer=pointer,
            code=f"broken_{what}",
        )
    size = sum(entry.numbers * ELEMENT_BYTES[entry.dtype] for entry in header.values())
    if size > context.most_bytes:
        raise no_room(f"{found.name} has {readable_bytes(size)} of tensors", context.most_bytes, pointer)
    with safe_open(found, framework="pt") as file:
        return {name: file.get_tensor(name) for name in header}


def load_model(document: JobDocument, context: LoaderContext) -> LoadedModel:
    """Load the model that the document names."""
    loaded: LoadedModel = _open(MODEL_SOURCES, document.model, ("model", "models"), context, document.task, context)
    return loaded


def _open(
    sources: Mapping[str, str],
    source: Any,  # noqa: ANN401 - any of the catalog's
    stage: tuple[str, str],
    context: LoaderContext,
    *arguments: object,
) -> Any:  # noqa: ANN401 - as its loader returns it
    """Have a source of the document opened by its loader; the stage is the block's name and the unit of progress."""
    block, unit = stage
    loader = sources.get(source.source)
    if loader is None:
        raise Refusal(
            f"`source: {source.source}` is not served here; take one of {', '.join(sources)}",
            pointer=f"/{block}/source",
            code="unsupported_source",
        )
    context.report(block, 0, None, unit)
    opened = resolve(loader)(source, *arguments)
    context.checkpoint()
    return opened


def load_data(document: JobDocument, loaded: LoadedModel, context: LoaderContext) -> DataStream:
    """Open the data that the document names."""
    return _stream(document.data, document, document.collection.batch_size, loaded, context)


def enter_data(document: JobDocument, loaded: LoadedModel, context: LoaderContext, inputs: ModelInputs) -> DataStream:
    """Give the workspace the data that the document names, and the examples that an analysis of it explains."""
    pads: list[int] = []
    data = _stream(document.data, document, document.collection.batch_size, _noting(loaded, pads), context)
    inputs.batches, inputs.examples, inputs.labels = data.batches, data.examples, data.labels
    inputs.text_of = data.text_of
    asked = document.given("query")
    if asked is not None:
        kind, source = asked
        block, quiet = getattr(document, kind).block, replace(context, describe=lambda *_: None)
        try:
            query = _stream(source, document, block, _noting(loaded, pads), quiet, kind)
        except Refusal as refused:
            # the loaders know of one source of data
            refused.pointer = f"/{kind}/query{(refused.pointer or '').removeprefix('/data')}"
            raise
        inputs.query = ModelInputs(batches=query.batches, examples=query.examples, text_of=query.text_of)
    return data


def _noting(loaded: LoadedModel, pads: list[int]) -> LoadedModel:
    """Return a model of which the padding is noted that loaders choose, and must be the same each time."""
    vocabulary = loaded.vocabulary
    if vocabulary is None or (pad_with := vocabulary.pad_with) is None:
        return loaded

    def note(pad_id: int) -> None:
        pads.append(pad_id)
        if pads[0] != pad_id:
            raise Refusal(
                f"a query ends with token {pads[0]}, which pads the data, as config.json names no `pad_token_id`; name "
                "one there that ends no text",
                pointer="/data",
                code="no_padding",
            )
        pad_with(pad_id)

    return replace(loaded, vocabulary=replace(vocabulary, pad_with=note))


def _stream(
    source: Any,  # noqa: ANN401 - any of the catalog's
    document: JobDocument,
    batch_size: int,
    loaded: LoadedModel,
    context: LoaderContext,
    kind: str | None = None,
) -> DataStream:
    """Open the data, or the query of an analysis of this kind."""
    texts = document.given("texts")
    task: Any = document.task  # the catalog requires one beside data
    request = DataRequest(
        task=task,
        loaded=loaded,
        batch_size=batch_size,
        seed=document.collection.seed,
        context=context,
        block="data" if kind is None else "query",
        texts=texts is not None and texts[1],
    )
    stream: DataStream = _open(DATA_SOURCES, source, ("data", "sources"), context, request)
    return validate_chunks(stream, loaded, "/data" if kind is None else f"/{kind}/query")


def try_before_training(document: JobDocument, context: LoaderContext) -> None:
    """Refuse data that a builtin model cannot take or has no classes for, before the model is trained."""
    source = document.model
    if not isinstance(source, BuiltinModel) or document.task is None or context.shapes_only:
        return
    make = resolve("worker.execution.models.builtin:untrained")(source.name, context.store)
    if make is None:
        return
    # the loaders have their say in the log when the job itself loads
    quiet = context.quiet()
    bare = load_model(document, replace(quiet, shapes_only=True))
    resolve("worker.execution.models.builtin:try_untrained")(make, load_data(document, bare, quiet), document.task)
    context.checkpoint()


def open_factors(document: JobDocument, assignment: Assignment, context: LoaderContext) -> Artifacts:
    """Open the factors of an earlier job, or a single matrix, in place of a model and data."""
    reference = document.factors
    path = None if reference is None else reference.path
    found = _open_stored(path, assignment.factors_path, "/factors", context)
    if isinstance(found, StoredFactors):
        if assignment.factors_path is None and reference is not None and reference.tensor is not None:
            raise Refusal("names a matrix in a file, and `path` is a folder; leave it out", pointer="/factors/tensor")
        return found
    takers = [kind for kind, analysis in ANALYSES.items() if analysis.takes_matrix is not None]
    if not set(document.kinds) <= set(takers):
        raise Refusal(
            f"is a file, and a single matrix is for {' and '.join(f'`{kind}`' for kind in takers)} alone; take "
            f"`kind: {takers[0]}`",
            pointer="/factors/path",
        )
    tensor = None if reference is None else reference.tensor
    symmetric = any(ANALYSES[kind].takes_matrix == "symmetric" for kind in document.kinds)
    return MatrixFile(found, tensor, context.log, context.most_bytes, symmetric=symmetric)


def open_gradient(document: JobDocument, context: LoaderContext) -> dict[str, Tensor] | None:
    """Read the gradient that the document names in place of that of its data; None for a plan, which reads none."""
    given = document.given("gradient")
    if given is None or context.shapes_only:
        return None
    gradient = load_gradient(given[1].path, context)
    context.checkpoint()
    return gradient


def open_against(document: JobDocument, assignment: Assignment, context: LoaderContext) -> Artifacts | None:
    """Open the second set of factors, if the document compares two."""
    given = document.given("against")
    if given is None:
        return None
    found = _open_stored(given[1].path, assignment.against_path, AGAINST, context)
    if isinstance(found, StoredFactors):
        return found
    raise Refusal(
        "is a file; give the folder that a job with `keep: [factors]` wrote, or the output of its run",
        pointer=f"{AGAINST}/path",
    )


def _open_stored(
    path: str | None, laid_out: Path | None, pointer: str, context: LoaderContext
) -> StoredFactors | OpenFile:
    """The factors in the folder that the parent laid out, or that the document names by its path; or a file of one."""
    if laid_out is not None:
        return find_factors(OpenFolder.by_itself(laid_out, pointer), pointer, context.most_bytes)
    if path is None:
        field = pointer.removeprefix("/").replace("/", ".")
        raise Refusal(
            f"names a job of the service; in the foreground give `{field}.path: FOLDER`", pointer=f"{pointer}/job"
        )
    found = context.open_path(path, f"{pointer}/path")
    return find_factors(found, f"{pointer}/path", context.most_bytes) if isinstance(found, OpenFolder) else found


@dataclass(frozen=True, kw_only=True)
class OpenedImages:
    """Images of a job, read by class and index."""

    data: ImageData

    @property
    def examples(self) -> int:
        """Images in all splits."""
        return sum(sum(split.sizes) for split in self.data.splits.values())

    @property
    def model_sha256(self) -> str | None:
        """Digest of the weights that the training begins with; None where it draws its own."""
        return None if self.data.weights is None else weights_digest(self.data.weights)

    def data_sha256(self, checkpoint: Callable[[], None]) -> str:
        """Return the digest of the images."""
        del checkpoint
        return self.data.sha256


def load_images(document: JobDocument, context: LoaderContext) -> OpenedImages:
    """Open the images that a document names: three splits of one image shape, which share no class and no image."""
    data: ImageData = _open(IMAGE_SOURCES, document.data, ("data", "sources"), context, context)
    given = document.given("weights")
    if given is None or context.shapes_only:
        return OpenedImages(data=data)
    return OpenedImages(data=replace(data, weights=load_weights(given[1], context)))
