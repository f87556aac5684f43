"""A problem: a model, what its outputs mean, and the layers whose A and G are wanted of a library.

Adapters of libraries that live in another environment read this file too, so it needs torch alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

Factors = dict[str, tuple[Tensor, Tensor]]
"""A and G by the layer's name in the problem's model."""


class Stream(Protocol):
    """Batches ``(inputs, targets)``, from the start at each ``iter``."""

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Begin anew."""

    def __len__(self) -> int:
        """Batches, at most."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a library is asked for."""

    name: str
    model: nn.Module
    """In evaluation mode; the parameters of the wanted layers alone are trainable."""
    layers: tuple[str, ...]
    """Names of the wanted layers; empty for whatever the library finds by itself."""
    task: Literal["classification", "causal_lm", "sentence_embedding"]
    examples: int
    """Examples of each batch."""
    terms: int
    """Loss terms of each example."""
    fisher: Literal["mc", "empirical"] = "mc"
    """One label sampled from the model per term, or the given one."""
    ignore_index: int = -100
    keys: Tensor | None = None
    """Which example each row of the stream is, for a library that can be told; else in order."""

    @property
    def loss(self) -> Literal["cross_entropy", "mse"]:
        """The loss that the task implies."""
        return "mse" if self.task == "sentence_embedding" else "cross_entropy"

    def outputs(self, model: nn.Module, inputs: Any) -> Tensor:  # noqa: ANN401 - a tensor, or a mapping of them
        """Outputs (terms of all examples, numbers per term) of ``model``, which may be a wrapped one."""
        returned = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        if isinstance(returned, tuple):
            returned = returned[0]
        if self.task == "sentence_embedding":
            hidden = returned.last_hidden_state
            weights = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            return (hidden * weights).sum(1) / weights.sum(1)
        logits: Tensor = returned if isinstance(returned, Tensor) else returned.logits
        if self.task == "causal_lm":
            logits = logits[:, :-1]
        return logits.reshape(-1, logits.shape[-1])

    def labels(self, targets: Tensor) -> Tensor:
        """Targets, one per term, in the order of ``outputs``."""
        if self.task == "sentence_embedding":
            return targets
        return (targets[:, 1:] if self.task == "causal_lm" else targets).reshape(-1)

    def summed_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Loss, summed over terms, at the given labels or at one sample from the model per term."""
        labels = self.labels(targets)
        if self.loss == "mse":
            if self.fisher == "mc":
                # Σ(f − y)² without ½ belongs to a Gaussian with variance ½
                labels = outputs.detach() + torch.randn_like(outputs) * 0.5**0.5
            return (outputs - labels).square().sum() / outputs.shape[-1] ** 0.5
        if self.fisher == "mc":
            with torch.no_grad():
                labels = torch.multinomial(torch.softmax(outputs, -1), 1).squeeze(-1)
        return functional.cross_entropy(outputs, labels, ignore_index=self.ignore_index, reduction="sum")
