"""Simulated autocast: the casts of ``torch.autocast("cuda", …)`` on the meta device, which torch has none for.

::

    products (convolutions, linear, matmul, attention)     inputs of 32 bits are cast to 16; weights once, and kept
    norms, exponentials, sums, softmax, losses             inputs of 16 bits are cast to 32
    everything else                                        as it is; tensors of different widths promote

Only shapes and dtypes matter there. Functions that are seen are those of ``torch``, ``torch.Tensor`` and
``torch.nn.functional`` as a model calls them, not what they are made of.

References:
    https://docs.pytorch.org/docs/stable/amp.html, "CUDA Op-Specific Behavior"
"""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map
from typing_extensions import override

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
        """Choose the 16 bits.

        Args:
            dtype: ``torch.bfloat16`` or ``torch.float16``.
        """
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
