"""Adapted layers: a frozen layer of a checkpoint, and the product of two small matrices beside it.

::

    linear       y = W x + b + s B A x
    with DoRA    y = m / n ⊙ (W + s B A) x + b,   n the norms of the rows of W + s B A, of which no gradient is taken
    embedding    y = W[i] + s B A[:, i]
    convolution  y = W * x + b + s B * (A * x),   B of 1×1

The forms of PEFT, in its order of operations. What is trained has the names that an adapter's file has.
"""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from typing_extensions import override


class AdaptedLayer(nn.Module):
    """A layer with an adapter beside it; the base's tensors stay as they are, ``scaling`` is the s of the formulas."""

    lora_A: nn.Linear | nn.Conv2d | nn.Embedding
    lora_B: nn.Linear | nn.Conv2d

    def __init__(self, base: nn.Module, scaling: float) -> None:
        super().__init__()
        self.base_layer = base
        self.scaling = scaling

    @property
    def weight(self) -> Tensor:
        """The frozen layer's weight, which some models look at."""
        return self.base_layer.weight  # type: ignore[return-value] # every layer that is adapted has one

    @property
    def bias(self) -> Tensor | None:
        """The frozen layer's bias."""
        return getattr(self.base_layer, "bias", None)

    @override
    def forward(self, inputs: Tensor) -> Tensor:  # (…, in), of images (N, channels, height, width)
        below: Tensor = self.base_layer(inputs)
        beside: Tensor = self.lora_B(self.lora_A(inputs))
        return below + beside * self.scaling

    def places(self) -> dict[str, Tensor]:
        """Return the adapter's tensors by their part, in the order of an adapter's file."""
        bias = {} if self.lora_B.bias is None else {"lora_B.bias": self.lora_B.bias}
        return {"lora_A": self.lora_A.weight, "lora_B": self.lora_B.weight, **bias}

    def merged_weight(self) -> Tensor:
        """Return the weight of the one layer that computes the same."""
        raise NotImplementedError


class AdaptedLinear(AdaptedLayer):
    """A linear layer, or a `Conv1D` of GPT-2, whose weight is transposed."""

    lora_A: nn.Linear
    lora_B: nn.Linear

    def __init__(self, base: nn.Module, rank: int, scaling: float, *, bias: bool = False) -> None:
        super().__init__(base, scaling)
        out, into = self._matrix().shape
        self.lora_A = nn.Linear(into, rank, bias=False, device=self.weight.device)
        self.lora_B = nn.Linear(rank, out, bias=bias, device=self.weight.device)

    def _matrix(self) -> Tensor:
        """Return the frozen weight, shape (out, in)."""
        return self.weight.T if isinstance(self.base_layer, Conv1D) else self.weight

    def _sum(self) -> Tensor:
        """Return W + s B A, shape (out, in)."""
        return self._matrix() + self.scaling * (self.lora_B.weight @ self.lora_A.weight)

    @override
    def merged_weight(self) -> Tensor:
        return self._sum().T if isinstance(self.base_layer, Conv1D) else self._sum()


class DecomposedLinear(AdaptedLinear):
    """The same with a magnitude for each output (DoRA)."""

    def __init__(self, base: nn.Module, rank: int, scaling: float) -> None:
        super().__init__(base, rank, scaling)
        self.lora_magnitude_vector = nn.Parameter(torch.ones(self.lora_B.out_features, device=self.weight.device))

    def _magnification(self) -> Tensor:
        """Return m / n, shape (out,)."""
        with torch.no_grad():
            norms = torch.linalg.vector_norm(self._sum(), dim=1)
        found: Tensor = self.lora_magnitude_vector / norms
        return found

    @override
    def forward(self, inputs: Tensor) -> Tensor:  # (…, in)
        below: Tensor = self.base_layer(inputs)
        beside: Tensor = self.lora_B(self.lora_A(inputs))
        magnification = self._magnification()
        product = below if self.bias is None else below - self.bias
        return below + (magnification - 1) * product + magnification * beside * self.scaling

    @override
    def places(self) -> dict[str, Tensor]:
        return {**super().places(), "lora_magnitude_vector": self.lora_magnitude_vector}

    @override
    def merged_weight(self) -> Tensor:
        whole = self._magnification()[:, None] * self._sum()
        return whole.T if isinstance(self.base_layer, Conv1D) else whole


class AdaptedEmbedding(AdaptedLayer):
    """An embedding; the first matrix is one too, and the second a linear layer."""

    lora_A: nn.Embedding
    lora_B: nn.Linear

    def __init__(self, base: nn.Embedding, rank: int, scaling: float) -> None:
        super().__init__(base, scaling)
        device = base.weight.device
        self.lora_A = nn.Embedding(base.num_embeddings, rank, padding_idx=base.padding_idx, device=device)
        self.lora_B = nn.Linear(rank, base.embedding_dim, bias=False, device=device)

    @override
    def forward(self, ids: Tensor) -> Tensor:  # (…) of token ids
        beside: Tensor = self.lora_B(self.lora_A(ids)) * self.scaling
        scale = getattr(self.base_layer, "embed_scale", None)  # as the frozen one scales what it looks up
        below: Tensor = self.base_layer(ids)
        return below + (beside if scale is None else beside * scale)

    @override
    def places(self) -> dict[str, Tensor]:
        return {"lora_embedding_A": self.lora_A.weight.T, "lora_embedding_B": self.lora_B.weight}

    @override
    def merged_weight(self) -> Tensor:
        first, second = self.places().values()
        return self.weight + (second @ first).T * self.scaling


class AdaptedConv2d(AdaptedLayer):
    """A convolution of images; the first matrix has its kernel, the second one pixel."""

    lora_A: nn.Conv2d
    lora_B: nn.Conv2d

    def __init__(self, base: nn.Conv2d, rank: int, scaling: float, *, bias: bool) -> None:
        super().__init__(base, scaling)
        size, stride, padding = base.kernel_size, base.stride, base.padding
        device = base.weight.device
        self.lora_A = nn.Conv2d(base.in_channels, rank, size, stride, padding, bias=False, device=device)  # type: ignore[arg-type]
        self.lora_B = nn.Conv2d(rank, base.out_channels, 1, bias=bias, device=device)

    @override
    def merged_weight(self) -> Tensor:
        first, second = self.lora_A.weight, self.lora_B.weight
        product = torch.einsum("or,rihw->oihw", second[:, :, 0, 0], first)
        return self.weight + product * self.scaling
