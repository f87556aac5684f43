"""The workspace of one job: everything that an analysis may use outside its own arithmetic.

An analysis is ``(params, workspace) -> Generator[LayerResult, None, Summary]``. It yields each layer's row as soon as
that layer is complete, reports progress, and calls ``workspace.ports.raise_if_cancelled()`` between units of work.

    inputs     the model, its data and the task, or factors stored earlier
    options    what the job document asks for
    machine    the device, its memory budget and its speed
    ports      where files, reports and log lines go
    resume     what an earlier attempt decided and completed
    results    what one analysis leaves for the next

Behind the ports stands what the caller has: the worker's child sends frames, ``kronoscope.local`` keeps all in memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from catalog import ANALYSES
from catalog.analyses.analysis import Decomposed
from catalog.requests.collection import Collection, Stabilisation
from catalog.requests.inputs import Task
from catalog.requests.memory import Memory
from catalog.requests.woodbury import Woodbury
from engine.artifacts import Artifacts
from engine.distributed.group import Ranks
from engine.image_data import ImageData
from engine.memory.budget import MemoryBudget
from engine.memory.device_speed import DeviceSpeed
from engine.memory.guard import Guard
from engine.memory.memory_curve import MemoryCurve
from engine.memory.plan import Chosen, Plan, Stage
from engine.tensor_file import Files

T = TypeVar("T")


class FactorCache(Protocol):
    """Factors of collections that were made before, by everything that their bits depend on."""

    def find(self) -> tuple[Artifacts, str] | None:
        """Return this collection's factors, and the job that made them; None where none has."""

    def shelf(self) -> Artifacts:
        """Return the place that the factors are written to where no job has made them."""

    def keep(self) -> None:
        """Publish the factors: everything is written."""

    def close(self) -> None:
        """End the writing: factors that are not kept by now are not wanted."""


def _ignore(*_: object) -> None:
    """Discard the report."""


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """The part of the data that this collection is over, where others collect the rest and the sums are merged.

    Examples are counted by their position in the data, whatever index each has of its own.
    """

    begin: int
    """First example, counted from 0 in the whole; a batch begins there, the number of which ``update_freq`` divides."""
    end: int
    """The example after the last one."""
    examples: int
    """N, examples in the whole."""
    batches: Callable[[], Iterator[tuple[Any, ...]]]
    """The whole data, as ``ModelInputs.batches`` of one undivided job. Its first batch is what the model is probed
    with, so that all parts find the same layers; a softmax head has its loss terms counted."""


@dataclass(kw_only=True, slots=True)
class ModelInputs:
    """The model under measurement with its data and task, or factors that were stored earlier."""

    model: nn.Module | None = None
    """None where stored factors are analysed."""
    batches: Callable[[], Iterator[tuple[Any, ...]]] | None = None
    """Called anew for each pass; yields ``(inputs, targets)`` or ``(inputs, targets, index)``."""
    task: Task | None = None
    examples: int | None = None
    """The number of examples in the data, where it is known; progress and plans use it. Of ranks, this one's."""
    examples_of_all: int | None = None
    """That of all ranks, where there are several and each knows its own; of ranks that are only planned, too."""
    labels: Callable[[], Iterator[tuple[Tensor, Tensor]]] | None = None
    """The targets (n, …) with the indices (n,) of their examples, where they can be read without the inputs."""
    part: DataPart | None = None
    """The part of the data that ``batches`` is; None where it is the whole."""
    stored: Artifacts | None = None
    """Factors collected earlier, in place of model, batches and task."""
    stored_pieces: tuple[Artifacts, ...] = ()
    """Factors collected earlier over disjoint examples, which are merged in this order; in place of the same."""
    bases: Artifacts | None = None
    """Eigenbases of merged factors, in which a part's correction is made, or those of ``stored_corrections`` are."""
    stored_corrections: tuple[Artifacts, ...] = ()
    """EK-FAC's corrections over the examples of ``stored_pieces``, in the same order."""
    stored_decompositions: tuple[Artifacts, ...] = ()
    """Decompositions of layers of the merged factors, which pieces of a divided job have made."""
    stored_scores: tuple[Artifacts, ...] = ()
    """Parts of the analysis with a round of its own, which pieces have computed; in the order of the queries."""
    gradient: Mapping[str, Tensor] | None = None
    """A gradient of the caller's by parameter, on the host, in place of that of the data."""
    text_of: Callable[[int], str] | None = None
    """Returns the text of an example by its place in the data, where texts are asked for and are there."""
    query: "ModelInputs | None" = None
    """The data whose losses an analysis explains."""
    images: ImageData | None = None
    """Images in classes, in place of model, batches and task."""
    stored_against: Artifacts | None = None
    """The second set of factors, which a comparison names."""

    @property
    def whole_examples(self) -> int | None:
        """Examples in the whole data, of which this may be a part; None where they are not known."""
        return self.examples if self.part is None else self.part.examples

    @property
    def reads_stored(self) -> bool:
        """Whether factors that were stored earlier stand in place of the model."""
        return self.stored is not None or bool(self.stored_pieces)

    def foreseen_examples(self, ranks: Ranks) -> int | None:
        """Return how many examples enter the factors together, of all ranks; None where that is not known."""
        return self.whole_examples if ranks.size == 1 and self.examples_of_all is None else self.examples_of_all


@dataclass(kw_only=True, slots=True)
class JobOptions:
    """The options of the job document."""

    collection: Collection = field(default_factory=Collection)
    stabilisation: Stabilisation = field(default_factory=Stabilisation)
    woodbury: Woodbury = field(default_factory=Woodbury)
    memory: Memory = field(default_factory=Memory)
    """How to stay within the memory budget."""
    kinds: tuple[str, ...] = ()
    """All analyses of this job; `factors` among them stores the factors."""
    keep: tuple[str, ...] = ("spectra",)
    """Artifacts that are stored besides the rows."""
    decomposition: Decomposed = "values"
    """The most that any analysis of this job needs of each factor: eigenvalues, or eigenvectors too."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The options record of each analysis that has one, by kind."""

    @property
    def passes_again(self) -> bool:
        """Whether an analysis passes over the data once more after the collection."""
        return self.asks("needs_model")

    @property
    def keeps_factors(self) -> bool:
        """Whether the factors are stored as artifacts."""
        return "factors" in self.keep or any(ANALYSES[kind].keeps_factors for kind in self.kinds)

    @property
    def layerwise(self) -> bool:
        """Whether every analysis reads of each layer no more than the rank has that the layer belongs to."""
        return all(ANALYSES[kind].layerwise for kind in self.kinds)

    def asks(self, name: str) -> bool:
        """Return whether the options of an analysis ask for something, neither by false nor by null.

        Args:
            name: A property of an options record.
        """
        return any(getattr(self.of(kind), name, None) not in (None, False) for kind in self.kinds)

    def of(self, kind: str) -> Any:  # noqa: ANN401 - each analysis has its own
        """Return the options record of one analysis.

        Args:
            kind: Name of the analysis.

        Returns:
            Its record, with defaults where the job gives none; None of an analysis without options.
        """
        params = ANALYSES[kind].params
        return self.params.get(kind) or (None if params is None else params())


@dataclass(kw_only=True, slots=True)
class Machine:
    """The device of the job, with the memory that it may use there and on the host."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    budget: MemoryBudget = field(default_factory=MemoryBudget.unlimited)
    guard: Guard = field(default_factory=Guard.unlimited)
    """Checks each large allocation against the budget, and takes a cheaper way where it would not fit."""
    speed: DeviceSpeed | None = None
    """Speed of the device at this moment, once it is measured: seconds are foreseen by it, and nothing is chosen."""
    measure_speed: Callable[[bool], DeviceSpeed | None] = _ignore
    """Measures the speed, that of the disk too where the argument says so; None takes typical values."""
    threads: Mapping[str, Any] = field(default_factory=dict)
    """The plan's entries on computing threads; empty where the caller has set them."""
    curve: MemoryCurve = field(default_factory=MemoryCurve)
    """How many bytes were held at which time."""
    ranks: Ranks = field(default_factory=Ranks.alone)
    """The processes that measure these data together, each its own part."""

    @property
    def planned_context(self) -> dict[str, Any]:
        """The plan's entries on the CUDA context and on threads."""
        return {**self.budget.planned_context, **self.threads}

    @contextlib.contextmanager
    def operation(self, name: str, stage: Stage | None = None) -> Iterator[None]:
        """Sample the memory curve before and after an operation.

        Args:
            name: Name of the operation in the curve.
            stage: Stage of the plan whose peak is measured meanwhile, if any.

        Returns:
            A context, which takes the second sample also where the operation raises.
        """
        self.curve.sample(name, "before", self.device)
        try:
            with contextlib.nullcontext() if stage is None else self.curve.stages.within(stage, self.device):
                yield
        finally:
            self.curve.sample(name, "after", self.device)


@dataclass(kw_only=True, slots=True)
class Ports:
    """Connections to the outside: files, reports, the log, cancellation."""

    artifacts: Artifacts
    """Place of the results."""
    keeps_files: bool = True
    """Whether what is written there is kept; False on a rank whose job has another one that writes."""
    files: Files | None = None
    """The same place for files of other kinds; None where they are not kept."""
    scratch: Artifacts | None = None
    """Place of factors that do not fit into memory together, and of checkpoints; None has neither."""
    cache: FactorCache | None = None
    """Factors of the same collection, from an earlier job or for the next one."""
    report: Callable[[str, int, int | None, str], None] = _ignore
    """``report(stage, done, total, unit)``."""
    log: Callable[[str, str], None] = _ignore
    """``log(level, message)``."""
    notice: Callable[[str], None] = _ignore
    """Receives what was read otherwise than it stands in the data, in a way that changes numbers; it is logged, too."""
    raise_if_cancelled: Callable[[], None] = _ignore
    """Raises ``StopRequested`` when the job should stop."""
    announce_plan: Callable[[Mapping[str, Any]], None] = _ignore
    """Receives the memory plan before anything large is allocated."""


@dataclass(kw_only=True, slots=True)
class Resume:
    """Decisions and rows of an earlier attempt at this job, and how this attempt saves its own state."""

    chosen: Chosen | None = None
    """The choice of the earlier attempt's plan, which is followed: another choice is another plan."""
    numerics: Mapping[str, Any] | None = None
    """The numerics of the first attempt, from its plan; None in a first attempt."""
    completed: frozenset[tuple[str, int]] = frozenset()
    """Rows ``(kind, ordinal)`` of an earlier attempt, not computed again."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Values that must be equal, besides the engine's own conditions, for a checkpoint to be continued."""
    checkpoint_seconds: float = 0.0
    """Seconds between two checkpoints of a collection; 0 saves none and resumes none."""


class JobResults:
    """The records that one analysis of a job leaves for the next: one of each type, made when it is first asked for."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        """The plan of this attempt, once it is made."""
        self._records: dict[type, Any] = {}

    def of(self, record: type[T]) -> T:
        """Return the job's record of a type.

        Args:
            record: A class that can be made without arguments; it belongs to the module that asks.

        Returns:
            The same instance at every call within one job.
        """
        if record not in self._records:
            self._records[record] = record()
        found: T = self._records[record]
        return found


@dataclass(kw_only=True, slots=True)
class Workspace:
    """One job, in parts."""

    inputs: ModelInputs
    ports: Ports
    options: JobOptions = field(default_factory=JobOptions)
    machine: Machine = field(default_factory=Machine)
    resume: Resume = field(default_factory=Resume)
    results: JobResults = field(default_factory=JobResults)

    @property
    def saves_checkpoints(self) -> bool:
        """Whether checkpoints are saved: there is a place for them, and an interval."""
        return self.ports.scratch is not None and self.resume.checkpoint_seconds > 0
