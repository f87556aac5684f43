"""Remembered rows: what a reconstruction has made of a layer, stored for an attempt that begins after it."""

from dataclasses import asdict, dataclass
from typing import Any

from catalog.analyses.reconstruction import ReconstructionMetrics
from catalog.record_reader import read
from engine.artifacts import load_sealed, save_sealed
from engine.factors.factor_files import Kept
from engine.factors.factor_set import LayerFacts
from engine.workspace import Workspace

_KIND = "reconstruction"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One layer's row, with its entries in the indices of the stabilised factors."""

    metrics: ReconstructionMetrics
    kept: Kept | None
    """The layer's entry in the index of factors; None where the result is not a set of factors, or nothing is kept."""
    entry: dict[str, Any] | None
    """Its entry in the index of sides that are no matrices."""


def remember(workspace: Workspace, facts: LayerFacts, outcome: Outcome) -> None:
    """Store what the summary and the indices need of a row."""
    if workspace.ports.scratch is None or not workspace.saves_checkpoints:
        return
    save_sealed(
        workspace.ports.scratch,
        _file(facts),
        {
            "conditions": dict(workspace.resume.conditions),
            "metrics": asdict(outcome.metrics),
            "kept": None if outcome.kept is None else asdict(outcome.kept),
            "entry": outcome.entry,
        },
    )


def recall(workspace: Workspace, facts: LayerFacts) -> Outcome | None:
    """Return a row that an earlier attempt has delivered, where it left what is needed of it."""
    if workspace.ports.scratch is None or (_KIND, facts.ordinal) not in workspace.resume.completed:
        return None
    try:
        table = load_sealed(workspace.ports.scratch, _file(facts))
        if table["conditions"] != dict(workspace.resume.conditions):
            return None
        return Outcome(
            metrics=read(ReconstructionMetrics, table["metrics"], "metrics"),
            kept=None if table["kept"] is None else Kept(**table["kept"]),
            entry=table["entry"],
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 - never written, damaged, or by another version: it is made anew
        return None


def _file(facts: LayerFacts) -> str:
    return f"{_KIND}/{facts.ordinal}.json"
