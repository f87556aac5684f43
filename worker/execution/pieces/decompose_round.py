"""The round `decompose`: whether the decompositions of a divided job are divided as well, and over how many pieces.

    saved = D · (1 − busiest)        cost = start + bytes / throughput        divided where saved > cost

D are the seconds of merge and decompositions by the plan, and `busiest` the part that the busiest of m pieces has
when layers go to pieces by longest processing time first. A piece starts a process, merges its own layers, and its
decompositions are brought to the job. m is the number of devices that may take pieces, at most one for each layer;
layers that share an A stay together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.requests.pieces import DecomposeRound, Piece
from engine.distributed.longest_first import divide_longest_first, longest_share
from engine.factors.factor_set import LayerFacts
from engine.measurement.divided_layers import layer_units

START_SECONDS = 20.0
"""Claim, process, imports and opening of the factors."""
BYTES_PER_SECOND = 100e6
"""Rate of a store of artifacts."""
_BYTES_OF_A_VALUE = 4


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The circumstances that the choice depends on besides the layers."""

    wanted: DecomposeRound
    collected: int
    """Pieces of the round `collect`."""
    devices: int
    """Devices that may take pieces."""
    plan: Mapping[str, Any] | None
    """The job's plan."""
    vectors: bool
    """Whether eigenvectors are asked for."""


def divide_decompositions(layers: Sequence[LayerFacts], given: Circumstances) -> tuple[tuple[Piece, ...], str]:
    """Divide layers into the pieces of a round."""
    if given.collected < 2:
        return (), "the job was collected in one piece"
    if given.wanted == "never":
        return (), "the operator has switched the round `decompose` off"
    units = layer_units(layers)
    costs = [cost for cost, _ in units]
    wanted = given.devices if given.wanted == "auto" else max(given.devices, given.collected)
    count = min(wanted, sum(cost > 0 for cost in costs))
    if count < 2:
        what = f"{given.devices} device{'s are' if given.devices != 1 else ' is'} at hand"
        return (), f"{what}, and {len(units)} group{'s' if len(units) != 1 else ''} of layers can be decomposed apart"
    busiest = longest_share(costs, count)
    why = "the operator asks for it in any case"
    if given.wanted == "auto":
        pays, why = _weigh(layers, given, count, busiest)
        if not pays:
            return (), why
    return _pieces(units, divide_longest_first(costs, count)), why


def _weigh(layers: Sequence[LayerFacts], given: Circumstances, count: int, busiest: float) -> tuple[bool, str]:
    seconds = ((given.plan or {}).get("stages") or {}).get("decomposition", {}).get("seconds")
    if seconds is None:
        return False, "nobody foresees how long decompositions take"
    saved, cost = seconds * (1 - busiest), START_SECONDS + _moved_bytes(layers, given) / BYTES_PER_SECOND
    why = (
        f"decompositions take about {seconds:.0f} s, of which {count} pieces save {saved:.0f} s, and to start them and "
        f"bring what they make takes {cost:.0f} s"
    )
    return saved > cost, why


def _moved_bytes(layers: Sequence[LayerFacts], given: Circumstances) -> float:
    """Triangles of every piece of `collect`, and the eigenvectors that come back."""
    numbers = sum(facts.in_dim**2 + facts.out_dim**2 for facts in layers)
    return _BYTES_OF_A_VALUE * numbers * (given.collected / 2 + (1 if given.vectors else 0))


def _pieces(units: Sequence[tuple[float, tuple[LayerFacts, ...]]], division: Sequence[int]) -> tuple[Piece, ...]:
    """One piece for each worker, its layers in the model's order; layers that cost nothing go with the others."""
    named: dict[int, list[LayerFacts]] = {}
    for (_, unit), worker in zip(units, division, strict=True):
        named.setdefault(worker, []).extend(unit)
    count = len(named)
    return tuple(
        Piece(
            round="decompose",
            index=index,
            count=count,
            layers=tuple(facts.name for facts in sorted(named[worker], key=lambda facts: facts.ordinal)),
        )
        for index, worker in enumerate(sorted(named))
    )
