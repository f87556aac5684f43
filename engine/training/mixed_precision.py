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

Simulated autocast: the casts of ``torch.autocast("cuda", …)`` on the meta device, which torch has none for.

::

    products (convolutions, linear, matmul, attention)     inputs of 32 bits are cast to 16; weights once, and kept
    norms, exponentials, sums, softmax, losses             inputs of 16 bits are cast to 32
    everything else                                        as it is; tensors of different widths promote

Only shapes and dtypes matter there. Functions that are seen are those of ``torch``, ``torch.Tensor`` and
``torch.nn.functional`` as a model calls them, not what they are made of.

References:
    Micikevicius et al. (2018), Mixed precision training
    https://docs.pytorch.org/docs/stable/amp.html, "CUDA Op-Specific Behavior"
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map
from typing_extensions import override

from engine.errors import TrainingRefused
from engine.model import mixed_precision

# fmt: off
_NARROW = frozenset([
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu", "linear",
    "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "addmm", "addmv", "addr", "baddbmm",
    "addbmm", "einsum", "chain_matmul", "multi_dot", "vecdot", "scaled_dot_product_attention",
])
_WIDE = frozenset([
    "pow", "__pow__", "__rpow__", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt",
    "softplus", "layer_norm", "group_norm", "rms_norm", "norm", "vector_norm", "normalize", "cosine_similarity",
    "nll_loss", "cross_entropy", "kl_div", "l1_loss", "smooth_l1_loss", "mse_loss", "huber_loss",
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss",
    "dist", "cdist", "pdist", "prod", "sum", "cumsum", "cumprod", "softmax", "log_softmax", "softmin",
    "logsumexp",
])
# fmt: on


class SimulatedAutocast(TorchFunctionMode):
    """A context in which what runs on the meta device has the dtypes that it would have under autocast."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Choose the 16 bits, ``torch.bfloat16`` or ``torch.float16``."""
        super().__init__()
        self._dtype = dtype
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}
        """Casts of weights by the weight's identity, with the weight, whose identity is so not another's."""

    @staticmethod
    def is_active() -> bool:
        """Tell whether a simulated autocast is entered."""
        return any(isinstance(mode, SimulatedAutocast) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._weights.clear()
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        cast = self._narrowed if name in _NARROW else _widened if name in _WIDE else None
        if cast is None:
            return func(*args, **(kwargs or {}))
        return func(*tree_map(cast, tuple(args)), **tree_map(cast, dict(kwargs or {})))

    def _narrowed(self, value: Any) -> Any:  # noqa: ANN401 - any argument
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self._dtype)
        if id(value) not in self._weights:
            self._weights[id(value)] = value, value.to(self._dtype)
        return self._weights[id(value)][1]


def _widened(value: Any) -> Any:  # noqa: ANN401 - any argument
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.to(torch.float32) if is_narrow else value


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
        """Return the context in which features are computed: torch's autocast to 16 bits, or one that does nothing.

        Float64 stays as it is on all devices. The meta device has none of torch's, and gets one that gives the same
        dtypes.
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

    The reason comes with it where it is not what was ``asked`` for; ``use_amp`` says whether 16 bits are wanted at all.
    ``TrainingRefused`` if float16 is asked for by name on a device other than CUDA, or the word is unknown.
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
