"""Counter-based random numbers: a function of a counter, not of earlier draws.

The label sampled for an example is keyed by (seed, the example's index, the loss term, the
sample), so it does not depend on batch size, batch order, micro-batches or the number of ranks.
The function is SplitMix64's finaliser, chained over the parts of the key in wrapping int64
arithmetic, which torch computes alike on every device.

References:
    Steele, Lea & Flood (2014), Fast splittable pseudorandom number generators
"""

import hashlib
import math

import torch
from torch import Tensor

_STATES = 2**32
_BLOCK = 64
_ROWS_AT_ONCE = 2**15

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right without the sign, which torch's own shift keeps."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(values: Tensor) -> Tensor:
    values = values + _signed(_GOLDEN)
    values = (values ^ _shifted(values, 30)) * _signed(_FIRST)
    values = (values ^ _shifted(values, 27)) * _signed(_SECOND)
    return values ^ _shifted(values, 31)


def uniforms(seed: int, *key: Tensor | int) -> Tensor:
    """Draw uniform numbers that are a function of the seed and a key.

    Args:
        seed: Seed of the job; its lowest 64 bits count.
        key: Integers or int64 tensors of shapes that broadcast with each other; their order matters.

    Returns:
        Numbers in [0, 1), float64, one per element of the broadcast shape, on the device of the key's first tensor.
    """
    device = next((part.device for part in key if isinstance(part, Tensor)), torch.device("cpu"))
    state = _mixed(torch.tensor(_signed(seed), dtype=torch.int64, device=device))
    for part in key:
        state = _mixed(state ^ torch.as_tensor(part, dtype=torch.int64, device=device))
    return _shifted(state, 11).to(torch.float64) * 2.0**-53


def normals(seed: int, *key: Tensor | int) -> Tensor:
    """Draw standard normal numbers that are a function of the seed and a key (Box & Muller).

    Args:
        seed: Seed of the job.
        key: Parts of the key, as for ``uniforms``.

    Returns:
        Numbers of mean 0 and variance 1, float64, one per element of the key's broadcast shape.
    """
    radius = torch.sqrt(-2 * torch.log1p(-uniforms(seed, *key, 0)))
    return radius * torch.cos(2 * math.pi * uniforms(seed, *key, 1))


def categories(probability: Tensor, uniform: Tensor) -> Tensor:
    """Draw class indices by inverting the distribution function.

    First the block of classes is found, then the class within it, so that all probabilities are read once. Blocks are
    summed up in float64: in float32 a vocabulary of 50,000 loses its tail.

    Args:
        probability: Probabilities, shape (…, C), any float dtype; they need not sum to exactly one.
        uniform: Numbers in [0, 1), shape (…), float64.

    Returns:
        Classes, shape (…), int64, none of which has probability zero.

    Memory:
        C / 64 + 128 float64 numbers for each of at most 32 Ki drawn classes.
    """
    width = probability.shape[-1]
    flat, chances = probability.reshape(-1, width), uniform.reshape(-1)
    starts = range(0, max(flat.shape[0], 1), _ROWS_AT_ONCE)
    drawn = [
        _drawn(flat[start : start + _ROWS_AT_ONCE], chances[start : start + _ROWS_AT_ONCE, None]) for start in starts
    ]
    return torch.cat(drawn).view(probability.shape[:-1])


def _drawn(probability: Tensor, chance: Tensor) -> Tensor:  # (P, C), (P, 1) -> (P,)
    width = probability.shape[-1]
    whole = width // _BLOCK * _BLOCK
    if whole <= _BLOCK:
        return _inverted(probability.to(torch.float64), chance)
    sums = probability[:, :whole].view(probability.shape[0], -1, _BLOCK).sum(-1)
    if whole < width:
        sums = torch.cat([sums, probability[:, whole:].sum(-1, keepdim=True)], 1)
    ends = _running_sums(sums.to(torch.float64))
    threshold = _below(ends[:, -1:], chance)
    block = torch.searchsorted(ends, threshold, right=True)
    size = sums.gather(1, block).to(torch.float64)
    # how far into its block the threshold lies, as a chance of its own
    within = ((threshold - ends.gather(1, block) + size) / size).clamp_(0, 1)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
    inside = probability.gather(1, columns.clamp(max=width - 1)).to(torch.float64)
    inside = inside.masked_fill_(columns >= width, 0.0)
    return block[:, 0] * _BLOCK + _inverted(inside, within)


def _inverted(probability: Tensor, chance: Tensor) -> Tensor:  # (P, C), (P, 1) -> (P,)
    cumulative = _running_sums(probability)
    return torch.searchsorted(cumulative, _below(cumulative[:, -1:], chance), right=True).squeeze(-1)


def _running_sums(values: Tensor) -> Tensor:
    """Return sums from the first number on, in an order of additions that is fixed."""
    # torch calls its own cumulative sum on a device not deterministic, and so would each job be that draws labels
    return values.cumsum(-1) if values.device.type == "cpu" else _doubled_sums(values)


def _doubled_sums(values: Tensor) -> Tensor:
    """Return sums from the first number on, each of twice as many numbers at every step."""
    step = 1
    while step < values.shape[-1]:
        values = torch.cat([values[..., :step], values[..., step:] + values[..., :-step]], -1)
        step *= 2
    return values


def _below(total: Tensor, chance: Tensor) -> Tensor:
    """Return ``chance · total``, less than ``total`` whatever is rounded: beyond it are impossible classes."""
    return torch.minimum(chance * total, torch.nextafter(total, torch.zeros_like(total)))


def keyed_generator(key: str, counter: int) -> torch.Generator:
    """Make the generator of a counter, on the host.

    Torch's generator there has 2³² starting states, so counters of one key never share one as long as they differ by
    less; two keys may, by chance.

    Args:
        key: The draws' name, with the seed in it.
        counter: Such as the number of an episode.
    """
    first = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    return torch.Generator().manual_seed((first + counter) % _STATES)
