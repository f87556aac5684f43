"""Mixed precision: the model computes in 16 bits, the sums stay in float32.

bfloat16 has the exponents of float32 and needs nothing else. float16 does not: directions are
multiplied by a power of two ``s`` before they are pulled back, and gradients divided by it as they
arrive, in float32, so that everything made of them is as if there had been none (G would else be
``s²`` too large). Where a gradient overflows, nothing of that direction has entered anything yet:
``s`` is halved and the direction pulled back again. After many that did not, ``s`` is doubled.

Apart from what the model computes in, the products that add up A and G may take float32 rounded to
TF32: 10 bits behind the leading one, the exponents of float32, and sums in float32.

References:
    Micikevicius et al. (2018), Mixed precision training
"""

import contextlib
from dataclasses import dataclass, replace
from typing import Literal

import torch

from engine.errors import NonFiniteFactor
from engine.model.state.preserve_state import products_in_tf32

FIRST_SCALE = 2.0**12
"""Directions are of one example each, hence about one at the outputs: far from both ends of float16."""
_LARGEST_SCALE = 2.0**15
_SMALLEST_SCALE = 2.0**-24
_PATIENCE = 500
"""Directions in a row without overflow, before the scale is doubled."""
_TF32_ROUNDING = 2.0**-10
"""Most that TF32 changes a number, relative to it: a device may drop the bits that are too many instead of rounding."""
_TF32_CAPABILITY = (8, 0)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision that the model computes in, and that of the products behind A and G."""

    amp: Literal["off", "bf16", "fp16"] = "off"
    """The precision that is used."""
    fallback: str | None = None
    """The reason why it is not the one that was asked for; None where it is."""
    sums: Literal["ieee", "tf32"] = "ieee"
    """The precision that is used for the products that add up A and G."""
    sums_fallback: str | None = None
    """The reason why that is not the one that was asked for; None where it is."""

    @property
    def sums_rounding(self) -> float:
        """Largest relative difference between a float32 row's number and the one that enters those products."""
        return _TF32_ROUNDING if self.sums == "tf32" else 0.0

    def adding(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which rows are multiplied that add up A and G: nothing else enters it."""
        return products_in_tf32() if self.sums == "tf32" else contextlib.nullcontext()

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


def choose_precision(
    asked: Literal["off", "bf16", "fp16"], device: torch.device, sums: Literal["ieee", "tf32"] = "ieee"
) -> Precision:
    """Choose what model and sums compute in: as asked for where the device has units for it, else full width.

    Args:
        asked: The job's ``collection.amp``.
        device: Device that the job computes on.
        sums: The job's ``collection.precision``.

    Returns:
        The precision, with the reason where it is not what was asked for.
    """
    missing = _reason_without_tf32(device) if sums == "tf32" else None
    return replace(_of_model(asked, device), sums="ieee" if missing else sums, sums_fallback=missing)


def _of_model(asked: Literal["off", "bf16", "fp16"], device: torch.device) -> Precision:
    if asked == "bf16" and not _has_bfloat16(device):
        name = "this CPU" if device.type == "cpu" else "this device"
        return Precision(fallback=f"{name} has no bfloat16 units")
    if asked == "fp16" and device.type != "cuda":
        return Precision(fallback="float16 is for CUDA devices")
    return Precision(amp=asked)


def _reason_without_tf32(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "TF32 is for CUDA devices"
    # without a device here it is planned for a machine that has one
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _TF32_CAPABILITY:
        return "this device has no TF32 units"
    return None


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
