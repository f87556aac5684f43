"""The job document: the same in the CLI, in ``POST /v1/jobs`` and in the database."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from catalog.analyses.analysis import Analysis
from catalog.record import FieldError, option, record
from catalog.requests.collection import Collection, Stabilisation
from catalog.requests.data_sources import DataSource
from catalog.requests.extending import ExtendsReference, require_extension
from catalog.requests.inputs import EMBEDDINGS, ModelSource, Task, require_job_or_path
from catalog.requests.memory import Memory
from catalog.requests.pieces import Shards, require_divisible
from catalog.requests.ranks import require_ranks
from catalog.requests.schedule import Schedule
from catalog.requests.series import Series, require_series
from catalog.requests.woodbury import Woodbury

_BLOCKS = ("model", "task", "factors", "extends", "shards")
_OPTIONS = {"collection": Collection, "stabilisation": Stabilisation, "woodbury": Woodbury}
_HELD = ("micro_batch", "offload", "activation_checkpointing", "model_sharding")
MAX_LABELS = 32
MAX_NAME = 120
MAX_NOTE = 2_000
_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")


@record
class FactorsReference:
    """Factors collected earlier: give `job` or `path`."""

    job: str | None = None
    """Id of a succeeded job that kept its factors."""
    path: str | None = None
    """A folder with `factors.index.json`; or a `.safetensors` file with a matrix of your own: any for
    `compression` alone, a symmetric one for `reconstruction`. A service reads what lies in folders that its operator
    lists."""
    tensor: str | None = None
    """Name of the matrix, where the file holds several tensors."""

    def __post_init__(self) -> None:
        """Require exactly one of the two."""
        require_job_or_path(self.job, self.path)
        if self.tensor is not None and self.path is None:
            raise FieldError("tensor", "names a matrix in a file; give its `path`, or leave `tensor` out")


@record
class JobDocument:
    """One request. ``catalog.DOCUMENT`` adds a block of options for each analysis of the menu."""

    analyses: ClassVar[Mapping[str, Analysis]] = {}
    """The menu, by kind."""
    kind: str | tuple[str, ...]
    """An analysis of the menu, or a list of them over one collection."""
    model: ModelSource | None = None
    """The model under measurement."""
    data: DataSource | None = None
    """The data that the model is measured on."""
    task: Task | None = None
    """What the model's outputs mean, hence its likelihood."""
    factors: FactorsReference | None = None
    """Replaces model, data, task and collection: analyse factors already collected."""
    extends: ExtendsReference | None = None
    """A finished collection that the examples of `data` are added to: model, task, collection and woodbury are those of
    that job's document. The factors are those of one job over all the examples."""
    collection: Collection = option(Collection)
    """How the curvature is collected."""
    stabilisation: Stabilisation = option(Stabilisation)
    """The damping, and the clipping of eigenvalues."""
    woodbury: Woodbury = option(Woodbury)
    """Which layers keep gradient rows in place of G."""
    memory: Memory = option(Memory)
    """The memory budget, and how to stay within it."""
    keep: tuple[Literal["factors", "spectra", "directions"], ...] = ("spectra",)
    """What stays as artifacts; the analysis `factors` always keeps its factors, and `spectra` are kept where an
    analysis needs eigenvalues: none is computed only to be kept. `directions` are those of `natural_gradient`: for each
    α a file `directions/{α}.safetensors` with a tensor for every trainable parameter, zero where no layer covers it."""
    cache: Literal["use", "refresh", "off"] = "use"
    """Whether factors of the same collection (model, data, options, code and numerics to the bit) are taken from the
    cache, and left there for the next job. `refresh` collects and replaces them, `off` does neither. A collection with
    `collection.nested`, a head of which a sketch or the diagonal alone was kept, or a model from a factory is not
    cached."""
    name: str | None = None
    """A name of your own, which lists show and can be searched for; it need not be unique. Like `schedule` it is no
    part of the stored document."""
    labels: Mapping[str, str] = option(dict)
    """Pairs of your own to find the job by."""
    shards: Shards | None = None
    """The number of pieces that the data are cut into, each a job of its own that any worker takes; `auto` takes as
    many as the plan and the devices at hand make worth while. The factors are those of all examples, merged in the
    order of the pieces. Null is a job that is not divided."""
    series: Series | None = None
    """Checkpoints of `model`, each of which gets a job of its own. Null is a job of one model."""
    world_size: int = 1
    """Devices of one node that compute the job together, each with a process of its own (a rank) that measures every
    `world_size`-th batch. On a node without a GPU the ranks share its processors and its memory."""
    reproduces: str | None = None
    """Id of a succeeded job of this document that is computed again, by its plan and without cached factors; the
    manifest's `reproduction` compares the two. In the foreground the folder of a run."""
    schedule: Schedule = option(Schedule)
    """Before which of your jobs it goes, and until when it may take; no part of the stored document."""

    def __post_init__(self) -> None:
        """Refuse documents whose parts contradict each other."""
        if not self.kinds:
            raise FieldError("kind", "is empty; name at least one analysis")
        if len(set(self.kinds)) != len(self.kinds):
            raise FieldError("kind", "names an analysis twice; name each once")
        self._require_inputs()
        self._require_likelihood()
        for kind in self.kinds:
            require = getattr(getattr(self, kind, None), "require_options", None)
            if require is not None:
                require(self)
        self._require_model()
        self._require_kept()
        require_extension(self)
        require_divisible(self)
        require_series(self)
        require_ranks(self)
        _require_labels(self.labels)
        if self.name is not None:  # as lists are searched: one letter has several spellings
            object.__setattr__(self, "name", unicodedata.normalize("NFC", self.name))
        _require_name(self.name)

    def _require_inputs(self) -> None:
        asked = [self.analyses[kind] for kind in self.kinds]
        for analysis in asked:
            if self.data is not None and self.data.source not in analysis.data_sources:
                others = ", ".join(analysis.data_sources)
                raise FieldError(
                    "data",
                    f"is of `source: {self.data.source}`, which `{analysis.kind}` cannot read; take one of {others}",
                )
        apart = next((analysis for analysis in asked if not analysis.collects), None)
        if apart is not None:
            _require_alone(self, apart)
            return
        if self.extends is not None:
            return
        inputs = {"model": self.model, "data": self.data, "task": self.task}
        for name, value in inputs.items():
            if self.factors is None and value is None:
                raise FieldError(name, f"is missing; give `{name}`, or `factors` of an earlier job")
            if self.factors is not None and value is not None:
                raise FieldError(name, f"contradicts `factors`: leave `{name}` out, or leave `factors` out")
        if self.factors is not None and any(self.analyses[kind].keeps_factors for kind in self.kinds):
            raise FieldError("kind", "`factors` collects; with `factors:` given they are there already")

    def _require_likelihood(self) -> None:
        if self.task is None:
            return
        if self.task.likelihood == "model" and self.collection.fisher != "empirical":
            raise FieldError(
                "task", "`loss: model` has no known likelihood to sample from; take `collection.fisher: empirical`"
            )
        if self.task.type in EMBEDDINGS and self.collection.fisher == "empirical":
            raise FieldError("task", f"`{self.task.type}` has no targets; take `collection.fisher: mc` or `type2`")

    def _require_model(self) -> None:
        """Refuse options that ask more of the model than was given."""
        for kind in self.kinds:
            asked = getattr(getattr(self, kind, None), "needs_model", None)
            if asked is not None and self.factors is not None:
                raise FieldError(
                    "factors",
                    f"hold no model, and `{asked}` needs it: give `model`, `data` and `task`, or leave it out",
                )
            if asked is not None and self.task is not None and self.task.likelihood == "model":
                raise FieldError(
                    "task",
                    f"`loss: model` has no known Hessian, and `{asked}` needs it: name the loss, or leave it out",
                )
        for kind in self.kinds:
            require = getattr(getattr(self, kind, None), "require_document", None)
            # of an extended job the child asks once it knows the collection
            if require is not None and self.extends is None:
                require(self)

    def _require_kept(self) -> None:
        offered = {name for kind in self.kinds for name in self.analyses[kind].offers}
        if any(name in self.keep and name not in offered for each in self.analyses.values() for name in each.offers):
            raise FieldError(
                "keep", "holds `directions`, which are those of `natural_gradient`; add it to `kind`, or leave them out"
            )

    def given(self, name: str) -> tuple[str, Any] | None:
        """Return an option that one of the analyses asked for was given.

        Args:
            name: Name of the option, whose default is null.

        Returns:
            The kind of that analysis and the option's value; None where no analysis has been given it.
        """
        values = ((kind, getattr(getattr(self, kind, None), name, None)) for kind in self.kinds)
        return next((each for each in values if each[1] is not None), None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The analyses asked for, in order."""
        return (self.kind,) if isinstance(self.kind, str) else self.kind


@record
class Annotations:
    """Labels and note of a job, which may be edited at any time; what is left out, or null, stays."""

    labels: Mapping[str, str] | None = None
    """All labels that the job has from now on, in place of those before."""
    note: str | None = None
    """A text of your own of at most 2,000 characters, in lines; an empty one removes the note."""

    def __post_init__(self) -> None:
        """Refuse what a document could not have either, and a note with control characters."""
        _require_labels(self.labels or {})
        note = self.note or ""
        if len(note) > MAX_NOTE or not all(line.isprintable() for line in note.split("\n")):
            raise FieldError(
                "note",
                f"must be at most {MAX_NOTE:,} printable characters in lines (got {len(note):,}, {note[:40]!r}); "
                "shorten it, and leave out control characters",
            )


def _require_name(name: str | None) -> None:
    if name is not None and not (0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()):
        raise FieldError(
            "name", f"must be 1 to {MAX_NAME} printable characters without blanks around them (got {name[:40]!r})"
        )


def _require_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > MAX_LABELS:
        raise FieldError("labels", f"holds {len(labels)} labels; at most {MAX_LABELS} are kept")
    for name, text in labels.items():
        if not _LABEL_NAME.fullmatch(name) or len(text) > 256 or not text.isprintable():
            raise FieldError(
                "labels",
                f"holds {name[:63]!r}: {text[:40]!r}; take names of A-Z, a-z, 0-9 and ._/- (at most 63) and "
                "printable values (at most 256)",
            )


def _require_alone(document: "JobDocument", analysis: Analysis) -> None:
    """Refuse what has no meaning beside an analysis that measures no curvature of a given model."""
    kind = f"`{analysis.kind}`"
    if len(document.kinds) > 1:
        raise FieldError("kind", f"names {kind} beside others, and it collects nothing; give it a job of its own")
    for name in analysis.inputs:
        if getattr(document, name) is None:
            raise FieldError(name, f"is missing; {kind} needs `{name}`")
    for name in _BLOCKS:
        if name not in analysis.inputs and getattr(document, name) is not None:
            raise FieldError(name, f"has no part in {kind}; leave it out")
    _require_no_options(document, kind)
    if document.world_size != 1:
        raise FieldError("world_size", f"is {document.world_size}, and {kind} computes in one process; leave it out")
    others = [name for name in document.keep if name != "spectra"]
    if others:
        raise FieldError("keep", f"holds `{others[0]}`, and {kind} makes none; leave it out")


def _require_no_options(document: "JobDocument", kind: str) -> None:
    for name, options in _OPTIONS.items():
        if getattr(document, name) != options():
            raise FieldError(name, f"has no part in {kind}, which collects nothing; leave it out")
    for name in _HELD:
        if getattr(document.memory, name) != getattr(Memory(), name):
            raise FieldError(f"memory.{name}", f"has no part in {kind}, which plans its own slices; leave it out")
