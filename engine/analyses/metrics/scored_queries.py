"""Scored queries: a block of them that is done, stored for an attempt that begins after it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from catalog.analyses.influence import InfluenceParams, QueryInfluence, ScoredExample
from engine.factors.kronecker_factors import digest
from engine.workspace import ModelInputs, Workspace, load_sealed, save_sealed

_FOLDER = "influence"
_CHARACTERS = 500


@dataclass(kw_only=True)
class ScoredQueries:
    """The numbers of a block of queries that the rows and the summary are made of, beside its scores."""

    self_influences: list[float]
    residuals: list[float] | None
    iterations: list[int] | None
    difference: float
    terms: float
    squares: list[float]
    """By layer: the sum of the queries' squared gradient norms."""
    inner: list[float]
    """By layer: the sum of gᵀ(C + λ)⁻¹g."""


def remember(
    workspace: Workspace, number: int, stands: Mapping[str, str], block: ScoredQueries, scores: dict[str, Tensor]
) -> None:
    """Store a block by its number, with its scores (Q, N) by group, and what both depend on."""
    scratch = workspace.ports.scratch
    if scratch is not None and workspace.saves_checkpoints:
        scratch.save_tensors(f"{_FOLDER}/{number}.safetensors", scores, {})
        body = {
            "conditions": {**workspace.resume.conditions, **stands},
            "block": asdict(block),
            "digests": {name: digest(own) for name, own in scores.items()},
        }
        save_sealed(scratch, f"{_FOLDER}/{number}.json", body)


def recall(
    workspace: Workspace, number: int, stands: Callable[[], Mapping[str, str]]
) -> tuple[ScoredQueries, dict[str, Tensor]] | None:
    """Return a block that an earlier attempt has stored, if it depends on the same and its files are whole."""
    scratch = workspace.ports.scratch
    if scratch is None or not workspace.saves_checkpoints:
        return None
    try:
        table = load_sealed(scratch, f"{_FOLDER}/{number}.json")
        block = ScoredQueries(**table["block"])
        if table["conditions"] != {**workspace.resume.conditions, **stands()}:
            return None
        scores = scratch.load_tensors(f"{_FOLDER}/{number}.safetensors")
        return (block, scores) if {name: digest(own) for name, own in scores.items()} == table["digests"] else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def list_queries(
    params: InfluenceParams, inputs: ModelInputs, first: int, block: ScoredQueries, scores: Tensor
) -> list[QueryInfluence]:
    """Return what the summary lists of a block's queries.

    Args:
        params: How many queries and examples are listed.
        inputs: The data and the query, with their texts where these are asked for.
        first: The first query's place.
        scores: Its scores, shape (Q, N).
    """
    count, found = min(params.top, scores.shape[1]), []
    for place, own in enumerate(scores[: max(0, params.listed - first)]):
        residual = None if block.residuals is None else block.residuals[place]
        found.append(
            QueryInfluence(
                query=first + place,
                text=_quoted(inputs.query, first + place),
                self_influence=block.self_influences[place],
                residual=residual,
                iterations=None if block.iterations is None else block.iterations[place],
                converged=residual is None or residual <= params.tolerance,
                lowering=_extreme(inputs, own, count, largest=False),
                raising=_extreme(inputs, own, count, largest=True),
            )
        )
    return found


def _extreme(inputs: ModelInputs, scores: Tensor, count: int, *, largest: bool) -> tuple[ScoredExample, ...]:
    """The examples with the lowest or highest scores (N,), the first of equal ones first."""
    order = torch.argsort(scores, descending=largest, stable=True)[:count].tolist()
    return tuple(ScoredExample(example=each, score=float(scores[each]), text=_quoted(inputs, each)) for each in order)


def _quoted(inputs: ModelInputs | None, place: int) -> str | None:
    """The text of an example, on one line; None where texts are not asked for."""
    if inputs is None or inputs.text_of is None:
        return None
    return "".join(each if each.isprintable() else " " for each in inputs.text_of(place)[:_CHARACTERS])
