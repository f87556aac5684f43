"""Weight formats: a layer's weights as fewer bits hold them, and the bytes that this takes.

Rounding is to the nearest, half to even; a scale is the largest number of its row, or of its group of columns, over the
largest that the format holds. These are the perturbations that a sensitivity is of, not a quantiser: a tool that
compensates errors, as GPTQ does, makes smaller ones.

Format choice: of several formats for each layer, those with the smallest sum of changes within a number of bytes.

A multiple-choice knapsack, by dynamic programming over the states that no other beats in both bytes and change
(Kellerer, Pferschy & Pisinger 2004, chapter 11). Their number may grow with the layers; beyond ``MOST_STATES`` those
near each other in bytes are represented by the one with the smallest change, and the width that they lie within is
counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from catalog.analyses.sensitivity import SensitivityParams, WeightFormat
from engine.linalg.eigensolvers import exact_svd

_SCALE_BYTES = 2
_KEPT_OF_FOUR = 2


def in_format(weights: Tensor, name: WeightFormat, params: SensitivityParams) -> Tensor:
    """Return weights (out, in), float64, as a format holds them; ``params`` has the groups' size and the rank."""
    match name:
        case "int8":
            return _rounded(weights, 127)
        case "int4":
            return _rounded(weights, 7)
        case "int4_group":
            groups = torch.split(weights, params.group, dim=1)
            return torch.cat([_rounded(each, 7) for each in groups], dim=1)
        case "fp8":
            scale = _scale(weights, torch.finfo(torch.float8_e4m3fn).max)
            return (weights / scale).to(torch.float32).to(torch.float8_e4m3fn).to(torch.float64) * scale
        case "2:4":
            return _two_of_four(weights)
        case "low_rank":
            left, values, right = exact_svd(weights, full_matrices=False)
            return (left[:, : params.rank] * values[: params.rank]) @ right[: params.rank]


def format_bytes(rows: int, columns: int, name: WeightFormat, params: SensitivityParams) -> int:
    """Return the bytes of a matrix of weights in a format, without its bias."""
    count = rows * columns
    match name:
        case "int8" | "fp8":
            return count + rows * _SCALE_BYTES
        case "int4":
            return -(-count // 2) + rows * _SCALE_BYTES
        case "int4_group":
            return -(-count // 2) + rows * -(-columns // params.group) * _SCALE_BYTES
        case "2:4":
            # of each four two numbers, and two bits of place for each
            fours, rest = divmod(columns, 4)
            return 2 * rows * (_KEPT_OF_FOUR * fours + rest) + -(-rows * fours * 2 * _KEPT_OF_FOUR // 8)
        case "low_rank":
            return 2 * min(params.rank, rows, columns) * (rows + columns)


def _scale(weights: Tensor, largest: float) -> Tensor:
    """(out, 1) scales; 1 for a row of zeros."""
    scale = weights.abs().amax(dim=1, keepdim=True) / largest
    return torch.where(scale > 0, scale, 1.0)


def _rounded(weights: Tensor, largest: int) -> Tensor:
    scale = _scale(weights, largest)
    return (weights / scale).round() * scale


def _two_of_four(weights: Tensor) -> Tensor:
    """The two largest of each four columns, the first of equal ones; columns that fill no four stay."""
    fours = weights.shape[1] // 4
    head = weights[:, : 4 * fours].reshape(weights.shape[0], fours, 4)
    order = head.abs().sort(dim=2, descending=True, stable=True).indices
    kept = torch.zeros_like(head, dtype=torch.bool).scatter_(2, order[:, :, :_KEPT_OF_FOUR], True)
    return torch.cat([(head * kept).flatten(1), weights[:, 4 * fours :]], dim=1)


MOST_STATES = 2**16
STATES_BYTES = 2**28
"""The most that the states of all layers may take; with more layers each has fewer."""
_STATE_BYTES = 5


@dataclass(frozen=True, kw_only=True)
class FormatChoice:
    """A choice for each layer."""

    chosen: tuple[int, ...]
    """The place of each layer's option."""
    total_bytes: int
    total: float
    """Sum of the changes."""
    slack_bytes: int
    """The choice is at least as good as the best within so many bytes less than the budget; 0 is the best itself."""


def states_bytes(layers: int) -> int:
    """Return the most bytes that the states of so many layers take."""
    return min(STATES_BYTES, _STATE_BYTES * MOST_STATES * layers)


def choose_formats(
    options: Sequence[Sequence[tuple[int, float]]], budget_bytes: int, raise_if_cancelled: Callable[[], None]
) -> FormatChoice | None:
    """Choose an option for each layer, the same one for the same numbers; None where not even the smallest options fit.

    Memory:
        At most ``STATES_BYTES``, and some twenty bytes for each state and option of one layer.
    """
    rest = [0]
    for each in reversed(options):
        rest.append(rest[-1] + min(size for size, _ in each))
    rest.reverse()
    if rest[0] > budget_bytes:
        return None
    sizes, changes = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    path: list[tuple[Tensor, Tensor]] = []
    slack, most = 0, max(2, min(MOST_STATES, STATES_BYTES // (_STATE_BYTES * max(1, len(options)))))
    for place, each in enumerate(options):
        raise_if_cancelled()
        own_sizes = torch.tensor([size for size, _ in each], dtype=torch.int64)
        own_changes = torch.tensor([change for _, change in each], dtype=torch.float64)
        grown_sizes, grown_changes = (sizes[:, None] + own_sizes).flatten(), (changes[:, None] + own_changes).flatten()
        kept = _unbeaten(grown_sizes, grown_changes, budget_bytes - rest[place + 1])
        if len(kept) > most:
            kept, width = _thinned(kept, grown_sizes, most)
            slack += width
        sizes, changes = grown_sizes[kept], grown_changes[kept]
        path.append(((kept // len(each)).to(torch.int32), (kept % len(each)).to(torch.uint8)))
    # the last of the unbeaten states has the smallest change
    state, chosen = len(sizes) - 1, []
    total_bytes, total = int(sizes[state]), float(changes[state])
    for parents, picked in reversed(path):
        chosen.append(int(picked[state]))
        state = int(parents[state])
    return FormatChoice(chosen=tuple(reversed(chosen)), total_bytes=total_bytes, total=total, slack_bytes=slack)


def _unbeaten(sizes: Tensor, changes: Tensor, most: int) -> Tensor:
    """Places of the states that no other beats, by ascending bytes and falling change."""
    there = torch.nonzero(sizes <= most).flatten()
    there = there[torch.sort(changes[there], stable=True).indices]
    there = there[torch.sort(sizes[there], stable=True).indices]
    own = changes[there]
    before = torch.cat([torch.full((1,), torch.inf, dtype=own.dtype), own.cummin(0).values[:-1]])
    return there[own < before]


def _thinned(kept: Tensor, sizes: Tensor, most: int) -> tuple[Tensor, int]:
    """Keep of neighbours in bytes the one with the smallest change, which is the last; and the first of all."""
    own = sizes[kept]
    width = -(-int(own[-1] - own[0] + 1) // max(1, most // 2))
    bucket = (own - own[0]) // width
    last = torch.cat([bucket[1:] != bucket[:-1], torch.ones(1, dtype=torch.bool)])
    last[0] = True
    return kept[last], width
