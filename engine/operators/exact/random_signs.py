"""Random signs of outputs, keyed by the example, so that batches do not matter."""

import torch
from torch import Tensor

from engine.model.counter_rng import uniforms

_SIGN_KEY = 0x5167
"""Tells the key of a sign from that of a sampled label."""
_SIGNS_AT_ONCE = 2**21
TANGENT = -1
"""In place of a probe's number."""


def signs(outputs: Tensor, index: Tensor, seed: int, probe: int) -> Tensor:
    """Draw independent signs, a function of (seed, probe, example, term, output).

    Args:
        outputs: Shape (N, R, C); dtype and device are taken from it.
        index: Index of each example, shape (N,), int64.
        seed: Seed of the job.
        probe: Number of the probe.

    Returns:
        Signs, shape (N, R, C), each 1 or -1.
    """
    examples, terms, width = outputs.shape
    drawn = torch.empty(examples * terms, width, dtype=outputs.dtype, device=outputs.device)
    example = index.repeat_interleave(terms)
    term = torch.arange(terms, device=outputs.device).repeat(examples)
    component = torch.arange(width, device=outputs.device)[None, :]
    rows = max(1, _SIGNS_AT_ONCE // max(width, 1))
    for first in range(0, examples * terms, rows):
        part = slice(first, first + rows)
        uniform = uniforms(seed, _SIGN_KEY, probe, example[part, None], term[part, None], component)
        drawn[part] = torch.where(uniform < 0.5, -1.0, 1.0)
    return drawn.view(outputs.shape)
