"""The workspace: everything an analysis may touch outside its own arithmetic.

An analysis is ``(params, workspace) -> Generator[LayerResult, None, Summary]``. It yields each
layer's row as soon as that layer is complete, reports progress, and calls ``checkpoint()``
between units of work so that it can be stopped. Whoever builds the workspace decides where
artifacts and reports go: the worker's child sends frames, a notebook keeps them in memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from catalog.analysis import Decomposed
from catalog.collection import Collection, Stabilisation
from catalog.inputs import Task
from catalog.memory import Memory
from catalog.woodbury import Woodbury
from engine.memory.budget import MemoryBudget
from engine.memory.device_speed import Pace
from engine.memory.guard import Guard
from engine.memory.memory_curve import MemoryCurve
from engine.memory.plan import Chosen, Plan, Stage


class Artifacts(Protocol):
    """Where tensors and tables are kept. Names are relative, with forward slashes."""

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write host tensors, atomically."""

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Read them back.

        Raises:
            FileNotFoundError: If nothing has that name.
        """

    def save_json(self, name: str, value: object) -> None:
        """Write a table, atomically."""

    def load_json(self, name: str) -> Any:  # noqa: ANN401 - whatever was written
        """Read it back.

        Raises:
            FileNotFoundError: If nothing has that name.
        """

    def remove(self, name: str) -> None:
        """Let go of what has that name, if anything has."""


class FactorCache(Protocol):
    """Factors of collections that were made before, by everything that their bits depend on."""

    def find(self) -> tuple[Artifacts, str] | None:
        """This collection's factors, and whose they are; None where nobody has made it."""

    def shelf(self) -> Artifacts:
        """Where they are to be written if nobody has."""

    def keep(self) -> None:
        """Everything is written."""

    def close(self) -> None:
        """Nothing more is written: what is not kept by now is not wanted."""


def _ignore(*_: object) -> None:
    """Report to nobody."""


@dataclass(kw_only=True)
class Workspace:
    """One job's model, data, options and ports."""

    model: nn.Module | None
    """None where stored factors are analysed."""
    batches: Callable[[], Iterator[tuple[Any, ...]]] | None
    """Called anew for each pass; yields ``(inputs, targets)`` or ``(inputs, targets, index)``."""
    task: Task | None
    artifacts: Artifacts
    collection: Collection = field(default_factory=Collection)
    stabilisation: Stabilisation = field(default_factory=Stabilisation)
    woodbury: Woodbury = field(default_factory=Woodbury)
    memory: MemoryBudget = field(default_factory=MemoryBudget.unlimited)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    guard: Guard = field(default_factory=Guard.unlimited)
    """Keeps what is allocated within the budget, and takes a lower rung where it would not."""
    decomposition: Decomposed = "values"
    """The most that any analysis of this job asks of each factor."""
    keep: tuple[str, ...] = ("spectra",)
    kinds: tuple[str, ...] = ()
    """All analyses of this job; `factors` among them keeps the factors."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Each analysis's options record, by kind, where it has one."""
    stored: Artifacts | None = None
    """Factors collected earlier, in place of model, batches and task."""
    cache: FactorCache | None = None
    """Where the same collection may have been made before, and is left for the next job."""
    scratch: Artifacts | None = None
    """Where collected factors wait that do not fit into memory together, and where checkpoints stand;
    without it, factors must fit and nothing is resumed."""
    checkpoint_seconds: float = 0.0
    """Between two checkpoints of a collection under way; 0 makes none, and resumes none."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """What must be equal, besides the engine's own, for an earlier attempt's checkpoint to be gone on with."""
    pace: Pace | None = None
    """What the device does in a second, where it was measured; None takes what is usual."""
    measure_pace: Callable[[], Pace | None] = _ignore
    """Measures it, for a job that is long enough; None where that cannot be done."""
    memory_options: Memory = field(default_factory=Memory)
    """How to keep within the budget."""
    chosen: Chosen | None = None
    """What an earlier attempt's plan chose, to be done again: another choice is another plan."""
    plan: Plan | None = None
    """What this attempt decided, once it has: the rung that each decomposition begins with, and where."""
    numerics: Mapping[str, Any] | None = None
    """What the job's first attempt computed with, as its plan has it; None in a first attempt."""
    examples: int | None = None
    """Examples in the data, where known: only for progress."""
    completed: frozenset[tuple[str, int]] = frozenset()
    """Rows ``(kind, ordinal)`` of an earlier attempt, not computed again."""
    report: Callable[[str, int, int | None, str], None] = _ignore
    """``report(stage, done, total, unit)``."""
    checkpoint: Callable[[], None] = _ignore
    """Raises ``StopRequested`` when the job should stop."""
    log: Callable[[str, str], None] = _ignore
    """``log(level, message)``."""
    planned: Callable[[Mapping[str, Any]], None] = _ignore
    """Receives the memory plan before anything large is allocated."""
    curve: MemoryCurve = field(default_factory=MemoryCurve)
    """What was held when."""
    shared: dict[str, Any] = field(default_factory=dict)
    """What one analysis of a job leaves for the next: the collection, the spectra."""

    @contextlib.contextmanager
    def operation(self, name: str, stage: Stage | None = None) -> Iterator[None]:
        """Sample the memory curve before and after; of a plan's ``stage``, also what is taken meanwhile."""
        self.curve.sample(name, "before", self.device)
        try:
            with contextlib.nullcontext() if stage is None else self.curve.stages.within(stage, self.device):
                yield
        finally:
            self.curve.sample(name, "after", self.device)

    def options(self, kind: str) -> Any:  # noqa: ANN401 - each analysis has its own
        """One analysis's options record; None where nobody has given any."""
        return self.params.get(kind)

    @property
    def checkpointed(self) -> bool:
        """Whether checkpoints are made: there is a place for them, and an interval."""
        return self.scratch is not None and self.checkpoint_seconds > 0
