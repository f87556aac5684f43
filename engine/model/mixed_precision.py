"""Mixed precision: the model computes in 16 bits, the sums stay in float32.

bfloat16 has the exponents of float32 and needs nothing else. float16 does not: directions are
multiplied by a power of two ``s`` before they are pulled back, and gradients divided by it as they
arrive, in float32, so that everything made of them is as if there had been none (G would else be
``s²`` too large). Where a gradient overflows, nothing of that direction has entered anything yet:
``s`` is halved and the direction pulled back again. After many that did not, ``s`` is doubled.

References:
    Micikevicius et al. (2018), Mixed precision training
"""

import contextlib
from dataclasses import dataclass
from typing import Literal

import torch

from engine.errors import NonFiniteFactor

FIRST_SCALE = 2.0**12
"""Directions are of one example each, hence about one at the outputs: far from both ends of float16."""
_LARGEST_SCALE = 2.0**15
_SMALLEST_SCALE = 2.0**-24
_PATIENCE = 500
"""Directions in a row without overflow, before the scale is doubled."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision that the model computes in."""

    amp: Literal["off", "bf16", "fp16"] = "off"
    """The precision that is used."""
    fallback: str | None = None
    """The reason why it is not the one that was asked for; None where it is."""

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the forward pass runs.

        Args:
            device: Device of the model. On the meta device passes run at full width, since torch has no such cast
                there.

        Returns:
            Torch's autocast to 16 bits, or a context that does nothing.
        """
        if self.amp == "off" or device.type == "meta":
            return contextlib.nullcontext()
        return torch.autocast(device.type, torch.bfloat16 if self.amp == "bf16" else torch.float16)

    def loss_scale(self, value: float, steady: int) -> "LossScale | None":
        """Make the scale that directions are multiplied by.

        Args:
            value: The scale to begin with, a power of two.
            steady: Directions without overflow since it last changed.

        Returns:
            The scale; None in bfloat16 and at full width, where directions need none.
        """
        return LossScale(value, steady) if self.amp == "fp16" else None


def choose_precision(asked: Literal["off", "bf16", "fp16"], device: torch.device) -> Precision:
    """Choose what the model computes in: as asked for where the device has units for it, else full width.

    Args:
        asked: The job's ``collection.amp``.
        device: Device that the job computes on.

    Returns:
        The precision, with the reason where it is not what was asked for.
    """
    if asked == "bf16" and not _has_bfloat16(device):
        name = "this CPU" if device.type == "cpu" else "this device"
        return Precision(fallback=f"{name} has no bfloat16 units")
    if asked == "fp16" and device.type != "cuda":
        return Precision(fallback="float16 is for CUDA devices")
    return Precision(amp=asked)


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda" and not torch.cuda.is_available():
        # planned for a machine that has one
        return True
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # torch has no public name for either
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())  # noqa: SLF001


@dataclass
class LossScale:
    """The power of two that directions are multiplied by."""

    value: float = FIRST_SCALE
    steady: int = 0
    """Directions since it last changed."""

    def lower(self) -> None:
        """Halve the scale, since a gradient has overflowed.

        Raises:
            NonFiniteFactor: If no scale is small enough.
        """
        self.value, self.steady = self.value / 2, 0
        if self.value < _SMALLEST_SCALE:
            raise NonFiniteFactor(
                f"gradients overflow float16 even when they are multiplied by {2 * self.value:.1g}, or are not finite "
                "at all; take `collection.amp: bf16` or `off`",
                pointer="/collection/amp",
            )

    def endure(self) -> None:
        """Count a direction of finite gradients, and double the scale after many of them."""
        self.steady += 1
        if self.steady == _PATIENCE and self.value < _LARGEST_SCALE:
            self.value, self.steady = 2 * self.value, 0
