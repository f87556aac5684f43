"""Mixed precision in training: bfloat16 where the device has units for it, else float16 with a scale for the loss.

==================  ==========================  ===========================================================
device              asked                       chosen
==================  ==========================  ===========================================================
any                 ``use_amp`` is off          full width
has bfloat16 units  ``auto``, ``bf16``          bfloat16, without a scale
CUDA without them   ``auto``, ``fp16``          float16; the loss is multiplied by S, the gradients divided by it
CUDA with them      ``fp16``                    the same
CPU without them    ``auto``, ``bf16``          full width, and the reason
CUDA without them   ``bf16``                    full width, and the reason
CPU                 ``fp16``                    refused
==================  ==========================  ===========================================================

References:
    Micikevicius et al. (2018), Mixed precision training
"""

import contextlib
from dataclasses import dataclass
from typing import Literal

import torch

from engine.errors import TrainingRefused
from engine.model import mixed_precision
from engine.training.simulated_autocast import SimulatedAutocast


@dataclass(frozen=True, kw_only=True)
class TrainingPrecision:
    """The precision that features are computed in, and the scale of the loss that it needs."""

    compute_dtype: torch.dtype = torch.float32
    """``torch.bfloat16`` or ``torch.float16``; ``torch.float32`` is the full width of the model, float64 included."""
    reason: str | None = None
    """The reason why it is not bfloat16 although 16 bits were asked for; None where it is what was asked for."""
    scaler: torch.amp.GradScaler | None = None
    """The scale of the loss; None where none is needed."""

    @property
    def fallback(self) -> str | None:
        """Why features are not computed in 16 bits although these were asked for; None where they are."""
        return self.reason if self.compute_dtype == torch.float32 else None

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return the context in which features are computed.

        Args:
            device: Device of the model. Float64 stays as it is on all of them.

        Returns:
            Torch's autocast to 16 bits, or a context that does nothing. On the meta device, which has none of torch's,
            one that gives the same dtypes.
        """
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        if device.type == "meta":
            return SimulatedAutocast(self.compute_dtype)
        return torch.autocast(device.type, self.compute_dtype)


def choose_precision(
    use_amp: bool, device: torch.device, asked: Literal["auto", "bf16", "fp16"] = "auto"
) -> TrainingPrecision:
    """Choose what features are computed in: 16 bits where the device has units for them, else full width.

    Args:
        use_amp: Whether 16 bits are wanted at all.
        device: Device that trains.
        asked: The kind of 16 bits.

    Returns:
        The precision, with the reason where it is not what was asked for.

    Raises:
        TrainingRefused: If float16 is asked for by name on a device other than CUDA, or the word is unknown.
    """
    if asked not in ("auto", "bf16", "fp16"):
        raise TrainingRefused(f"16 bits must be one of auto, bf16, fp16 (got {asked!r})")
    if not use_amp:
        return TrainingPrecision()
    if asked == "fp16" and device.type != "cuda":
        raise TrainingRefused(
            f"fp16 must run on a CUDA device (got {device.type!r}); take auto or bf16, which fall back to float32 "
            "where the device has no units for 16 bits"
        )
    native = mixed_precision.choose_precision("bf16", device)
    if asked != "fp16" and native.amp == "bf16":
        return TrainingPrecision(compute_dtype=torch.bfloat16)
    if asked == "bf16" or device.type != "cuda":
        return TrainingPrecision(reason=native.fallback)
    return TrainingPrecision(
        compute_dtype=torch.float16,
        reason=native.fallback if asked == "auto" else None,
        # planned for a machine that has a device, there is nothing to scale
        scaler=torch.amp.GradScaler("cuda") if torch.cuda.is_available() else None,
    )
