"""Random numbers that are a function of a counter, not of what was drawn before.

The label sampled for an example is keyed by (seed, the example's index, the loss term, the
sample), so it does not depend on batch size, batch order, micro-batches or the number of ranks.
The function is SplitMix64's finaliser, chained over the parts of the key in wrapping int64
arithmetic, which torch computes alike on every device.

References:
    Steele, Lea & Flood (2014), Fast splittable pseudorandom number generators
"""

import math

import torch
from torch import Tensor

_NUMBERS_AT_ONCE = 2**22

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical shift to the right (torch's own keeps the sign)."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(values: Tensor) -> Tensor:
    values = values + _signed(_GOLDEN)
    values = (values ^ _shifted(values, 30)) * _signed(_FIRST)
    values = (values ^ _shifted(values, 27)) * _signed(_SECOND)
    return values ^ _shifted(values, 31)


def uniforms(seed: int, *key: Tensor | int) -> Tensor:
    """Uniform float64 numbers in [0, 1), one per broadcast element of the integer ``key`` parts."""
    device = next((part.device for part in key if isinstance(part, Tensor)), torch.device("cpu"))
    state = _mixed(torch.tensor(_signed(seed), dtype=torch.int64, device=device))
    for part in key:
        state = _mixed(state ^ torch.as_tensor(part, dtype=torch.int64, device=device))
    return _shifted(state, 11).to(torch.float64) * 2.0**-53


def normals(seed: int, *key: Tensor | int) -> Tensor:
    """Standard normal float64 numbers, one per broadcast element of ``key`` (Box & Muller)."""
    radius = torch.sqrt(-2 * torch.log1p(-uniforms(seed, *key, 0)))
    return radius * torch.cos(2 * math.pi * uniforms(seed, *key, 1))


def categories(logits: Tensor, uniform: Tensor) -> Tensor:
    """Class indices (…,) drawn from ``softmax(logits)`` (…, C) by inverting the distribution.

    The cumulative sum is taken in float64: in float32 a vocabulary of 50,000 loses its tail.

    Memory:
        At most 4 Mi probabilities at once, three times over.
    """
    width = logits.shape[-1]
    rows = max(1, _NUMBERS_AT_ONCE // width)
    flat, chances = logits.reshape(-1, width), uniform.reshape(-1)
    starts = range(0, max(flat.shape[0], 1), rows)
    drawn = [_drawn(flat[start : start + rows], chances[start : start + rows]) for start in starts]
    return torch.cat(drawn).view(logits.shape[:-1])


def _drawn(logits: Tensor, uniform: Tensor) -> Tensor:
    cumulative = torch.softmax(logits.to(torch.float64), -1).cumsum(-1)
    threshold = uniform.unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return drawn.clamp_(max=logits.shape[-1] - 1)
