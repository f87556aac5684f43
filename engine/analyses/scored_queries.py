"""Scored queries: a block of them that is done, stored for an attempt that begins after it."""

from dataclasses import asdict, dataclass

from torch import Tensor

from engine.factors.kronecker_factors import digest
from engine.workspace import Workspace, load_sealed, save_sealed

_FOLDER = "influence"


@dataclass(kw_only=True)
class ScoredQueries:
    """The numbers of a block of queries that the rows and the summary are made of, beside its scores."""

    entered: str
    """Digest of its queries."""
    self_influences: list[float]
    residuals: list[float] | None
    iterations: list[int] | None
    difference: float
    terms: float
    squares: list[float]
    """By layer: the sum of the queries' squared gradient norms."""
    inner: list[float]
    """By layer: the sum of gᵀ(C + λ)⁻¹g."""


def remember(workspace: Workspace, number: int, block: ScoredQueries, scores: dict[str, Tensor]) -> None:
    """Store a block by its number, with its scores (Q, N) by group."""
    scratch = workspace.ports.scratch
    if scratch is not None and workspace.saves_checkpoints:
        scratch.save_tensors(f"{_FOLDER}/{number}.safetensors", scores, {})
        body = {
            "conditions": dict(workspace.resume.conditions),
            "block": asdict(block),
            "digests": {name: digest(own) for name, own in scores.items()},
        }
        save_sealed(scratch, f"{_FOLDER}/{number}.json", body)


def recall(workspace: Workspace, number: int, entered: str) -> tuple[ScoredQueries, dict[str, Tensor]] | None:
    """Return a block that an earlier attempt has stored, if its queries and its files have the same digests."""
    scratch = workspace.ports.scratch
    if scratch is None or not workspace.saves_checkpoints:
        return None
    try:
        table = load_sealed(scratch, f"{_FOLDER}/{number}.json")
        block = ScoredQueries(**table["block"])
        if table["conditions"] != dict(workspace.resume.conditions) or block.entered != entered:
            return None
        scores = scratch.load_tensors(f"{_FOLDER}/{number}.safetensors")
        return (block, scores) if {name: digest(own) for name, own in scores.items()} == table["digests"] else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
