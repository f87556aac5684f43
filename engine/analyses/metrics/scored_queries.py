"""Scored queries: a block of them that is done, stored for an attempt that begins after it, or for a divided job.

Scores are summed in groups of layers by a caller's own names: which layers each holds, and that it holds them whole.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from catalog.analyses.influence import InfluenceParams, QueryInfluence, ScoredExample
from engine.artifacts import Artifacts, load_sealed, save_sealed
from engine.errors import NotMergeable, UsageError
from engine.factors.kronecker_factors import digest
from engine.layers.layer import TreatedLayer
from engine.workspace import ModelInputs, Workspace

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
    entered: dict[str, Any]
    """Count and digests of its queries, as ``EnteredExamples`` has them."""
    queries: int | None
    """All queries, of a piece that has a part of them."""
    listed: list[dict[str, Any]] = field(default_factory=list)
    """Those that the summary lists, each as ``QueryInfluence``."""


def scores_file(number: int) -> str:
    """Return the name of the file with the scores of a block."""
    return f"{_FOLDER}/scores-{number:05d}.safetensors"


def remember(
    workspace: Workspace, number: int, stands: Mapping[str, str], block: ScoredQueries, scores: dict[str, Tensor]
) -> None:
    """Store a block by its number, with its scores (Q, N) by group, and what both depend on."""
    scratch = workspace.ports.scratch
    if scratch is not None and workspace.saves_checkpoints:
        scratch.save_tensors(scores_file(number), scores, {})
        seal(scratch, number, block, scores, {**workspace.resume.conditions, **stands})


def seal(
    place: Artifacts, number: int, block: ScoredQueries, scores: dict[str, Tensor], conditions: Mapping[str, Any]
) -> None:
    """Store the numbers of a block, the digests of its scores and what both depend on."""
    digests = {name: digest(own) for name, own in scores.items()}
    body = {"conditions": conditions, "block": asdict(block), "digests": digests}
    save_sealed(place, f"{_FOLDER}/{number}.json", body)


def recall(
    workspace: Workspace, number: int, stands: Callable[[], Mapping[str, str]]
) -> tuple[ScoredQueries, dict[str, Tensor]] | None:
    """Return a block that an earlier attempt has stored, if it depends on the same and its files are whole."""
    scratch = workspace.ports.scratch
    if scratch is None or not workspace.saves_checkpoints:
        return None
    return unseal(scratch, number, lambda: {**workspace.resume.conditions, **stands()})


def unseal(
    place: Artifacts, number: int, conditions: Callable[[], Mapping[str, Any]]
) -> tuple[ScoredQueries, dict[str, Tensor]] | None:
    """Return a block, if it is stored with these conditions and its files are whole."""
    try:
        table = load_sealed(place, f"{_FOLDER}/{number}.json")
        block = ScoredQueries(**table["block"])
        if table["conditions"] != conditions():
            return None
        scores = place.load_tensors(scores_file(number))
        return (block, scores) if {name: digest(own) for name, own in scores.items()} == table["digests"] else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def read_parts(parts: Sequence[Artifacts]) -> Iterator[tuple[ScoredQueries, dict[str, Tensor]]]:
    """Yield the blocks that the pieces of a divided job have stored, in the order of the queries.

    ``NotMergeable`` if one is missing or damaged.
    """
    number, done, total = 0, 0, 0
    for part in parts:
        while (found := unseal(part, number, dict)) is not None:
            yield found
            number, done, total = number + 1, done + int(found[0].entered["count"]), found[0].queries or 0
    if done != total or (parts and not number):
        raise NotMergeable(
            f"the pieces have whole scores of {done} queries, and there are {total}: the next ones are missing or "
            "damaged; submit the job again"
        )


def list_queries(
    params: InfluenceParams, inputs: ModelInputs, first: int, block: ScoredQueries, scores: Tensor
) -> list[QueryInfluence]:
    """Return what the summary lists of a block's queries.

    ``first`` is the first query's place, the scores are (Q, N); texts of data and query are listed if asked for.
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


ALL = "scores"
_POINTER = "/influence/groups"


def layer_groups(asked: Mapping[str, Sequence[str]], known: Sequence[str], *, parts: bool) -> dict[str, frozenset[str]]:
    """Return the layers of each group by its name, those of all layers first.

    ``known`` are names of layers, or of parameters where layers are not known yet; ``parts`` of layers (`name[0]`) may
    be among them. ``UsageError`` if one of the names belongs to no layer.
    """
    found = {ALL: frozenset(known)}
    for name, wanted in asked.items():
        own: set[str] = set()
        for each in wanted:
            plain = each if parts else each.partition("[")[0]
            here = {layer for layer in known if layer == plain or layer.startswith((f"{plain}.", f"{plain}["))}
            if not here:
                listed = ", ".join(f"`{layer}`" for layer in known)[:1000]
                raise UsageError(
                    f"`influence.groups` names `{each}` in `{name}`, of which no layer is a part; there are {listed}",
                    pointer=_POINTER,
                )
            own |= here
        found[f"{ALL}.{name}"] = frozenset(own)
    return found


def require_whole_layers(groups: Mapping[str, frozenset[str]], layers: Iterable[TreatedLayer]) -> None:
    """Raise ``UsageError`` for a group that holds a part of a layer: rows are seen of the whole layer."""
    for layer in layers:
        for name, own in groups.items():
            here = own.intersection(layer.parts)
            if here and len(here) < len(layer.parts):
                raise UsageError(
                    f"`influence.groups` names a part of layer `{layer.name}` in `{name.removeprefix(f'{ALL}.')}`, and "
                    f"scores are of whole layers; name `{layer.name}`",
                    pointer=_POINTER,
                )
