"""Panels: rows of a large matrix that visit the device, or float64, a few at a time.

A wide product is computed in float64, a panel of rows at a time: it takes 16 MiB beside the result where the matrix is
not float64 itself.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PANEL_NUMBERS = 2 * 2**20
"""Widened at once: 16 MiB in float64."""
_PANEL_BYTES = 8 * PANEL_NUMBERS
_NORM_NUMBERS = 2**18
"""Numbers of a panel in a norm: 2 MiB in float64, so that a norm also fits into small budgets."""


@dataclass(eq=False)
class _Slot:
    """One panel on the device, and its twin on the host."""

    leaving: Tensor
    arrived: Tensor
    copied: torch.cuda.Event | None
    rows: int = 0


class Arrivals:
    """Panels of at most ``rows`` rows of ``width`` numbers on their way to ``device``: one there, one under way.

    Memory:
        Two panels on the device, two on the host (pinned, for a GPU).
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._slots = [
            _Slot(
                leaving=torch.empty(rows, width, dtype=dtype, pin_memory=cuda),
                arrived=torch.empty(rows, width, dtype=dtype, device=device),
                copied=torch.cuda.Event() if cuda else None,  # type: ignore[no-untyped-call]
            )
            for _ in range(2)
        ]
        self._sent: list[_Slot] = []

    def send(self, panel: Tensor) -> None:
        """Send a panel off; the panel taken before the last ``take`` is overwritten.

        Args:
            panel: Shape (at most ``rows``, ``width``), on any device, of any precision.
        """
        slot = self._slots[0]
        self._slots.reverse()
        slot.rows = panel.shape[0]
        if slot.copied is not None:
            slot.copied.synchronize()
        slot.leaving[: slot.rows].copy_(panel)
        if self._stream is None or slot.copied is None:
            slot.arrived[: slot.rows].copy_(slot.leaving[: slot.rows])
        else:
            # what still computes with this panel was asked for before
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                slot.arrived[: slot.rows].copy_(slot.leaving[: slot.rows], non_blocking=True)
                slot.copied.record(self._stream)
        self._sent.append(slot)

    def take(self) -> Tensor:
        """Return the panel sent first of those not yet taken, shape (its rows, ``width``), on the device."""
        slot = self._sent.pop(0)
        if slot.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(slot.copied)
        return slot.arrived[: slot.rows]


def wide_product(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the wide product ``matrix right`` (n, k) of a matrix (n, m) and columns (m, k), float64, where it is."""
    if matrix.dtype == torch.float64:
        return matrix @ right
    rows = max(1, _PANEL_BYTES // (8 * max(matrix.shape[1], 1)))
    return torch.cat([panel.to(torch.float64) @ right for panel in torch.split(matrix, rows)])


def frobenius_norm(tensor: Tensor) -> float:
    """Return ‖S‖_F of a tensor of any shape and dtype, in float64, also where squares of its entries are beyond that.

    Memory:
        2 MiB twice, or a row where that is larger.
    """
    if not tensor.numel():
        return 0.0
    rows = max(1, _NORM_NUMBERS * tensor.shape[0] // tensor.numel())
    panels = torch.split(tensor.detach(), rows)
    # asked of the device once
    norms = [_norm(panel.to(torch.promote_types(panel.dtype, torch.float64))) for panel in panels]
    return float(_norm(torch.stack(norms)))


def _norm(wide: Tensor) -> Tensor:
    """The norm of float64 numbers over a power of two, which no square exceeds."""
    largest = torch.linalg.vector_norm(wide, math.inf)
    exponent = torch.where(largest.isfinite(), torch.frexp(largest).exponent - 1, 0).clamp_(min=-1000)
    unit = torch.ldexp(torch.ones_like(largest), exponent)
    norm: Tensor = torch.linalg.vector_norm(wide / unit) * unit
    return norm


def wide_transposed_product(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the wide product ``matrixᵀ right`` (m, k) of a matrix (n, m) and columns (n, k), float64, where it is."""
    if matrix.dtype == torch.float64:
        return matrix.mT @ right
    rows = max(1, _PANEL_BYTES // (8 * max(matrix.shape[1], 1)))
    total = torch.zeros(matrix.shape[1], right.shape[1], dtype=torch.float64, device=matrix.device)
    for panel, own in zip(torch.split(matrix, rows), torch.split(right, rows), strict=True):
        total += panel.to(torch.float64).mT @ own
    return total
