"""Embedding: ``a`` is one-hot, so A is diagonal with the relative counts of the ids.

Pooling one-hot vectors first (`reduce`) would make A dense in the vocabulary; an embedding is
therefore always treated position by position, and its record says so.

Gemma, BART, mBART, Pegasus and Marian multiply the vectors that they look up by √d in a subclass of
``nn.Embedding``. What such a subclass computes is not read from its name: it is run on a few ids with
tables put in the place of its own, which no other map of ids and table answers alike:

    ones                     the answer is c itself, the same everywhere
    ``W_vj = cos j``         the answer keeps the order of a vector's numbers
    ``W_vj = 1 + v``         the answer belongs to the ids that were asked for
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from engine.layers.layer import Form, TreatedLayer

_ROUNDING = 16.0
"""Times the unit of rounding that an answer may differ from the constant times its vector."""


def scale_of(module: nn.Embedding) -> float | None:
    """Return c where an embedding computes ``c · W[ids]``, in the precision of its weight.

    Memory:
        One number for each row of the table, and one for each column.
    """
    weight = module.weight
    rows, width = weight.shape
    if not rows or not width or {name for name, _ in module.named_parameters()} != {"weight"}:
        return None
    device = torch.device("cpu") if weight.is_meta else weight.device
    ids = torch.tensor([[rows - 1, 0, rows // 2]], device=device)
    columns = torch.arange(width, device=device, dtype=torch.float64).cos().to(weight.dtype)
    places = torch.arange(1, rows + 1, device=device, dtype=torch.float64).to(weight.dtype)
    scale: float | None = None
    for table in (torch.ones_like(columns)[None], columns[None], places[:, None]):
        spread = table.expand(rows, width)
        answer = _answer(module, ids, spread)
        if answer is None and weight.is_meta:
            # a scale without a number
            answer = _answer(module, ids.to("meta"), spread.to("meta"))
        wanted = spread[ids]
        if answer is None or answer.shape != wanted.shape or answer.dtype != weight.dtype:
            return None
        if answer.is_meta:
            return 1.0
        scale = float(answer.flatten()[0]) if scale is None else scale
        slack = _ROUNDING * torch.finfo(weight.dtype).eps * abs(scale)
        if not scale or not bool(((answer - scale * wanted).abs() <= slack * wanted.abs()).all()):
            return None
    return scale


def _answer(module: nn.Embedding, ids: Tensor, table: Tensor) -> Tensor | None:
    """Return the answer of ``module`` to ``ids`` (1, 3) with ``table`` in place of its own; None where it refuses."""
    with torch.no_grad(), _in_the_place_of(module, table):
        try:
            answer: object = module.forward(ids)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError):
            return None
    return answer if isinstance(answer, Tensor) else None


@contextlib.contextmanager
def _in_the_place_of(module: nn.Embedding, table: Tensor) -> Iterator[None]:
    """Let ``module`` look up in ``table`` while inside."""
    own = module._parameters  # noqa: SLF001 - setting the attribute takes parameters only
    weight = own["weight"]
    own["weight"] = table  # type: ignore[assignment]
    try:
        yield
    finally:
        own["weight"] = weight


@dataclass(eq=False)
class EmbeddingLayer(TreatedLayer):
    """``y = c · Wᵀ[id]``; the stored weight (vocabulary, d) is the convention's transpose.

    c is 1 but in subclasses that scale what they look up, where the rows are one-hot and ``c · g``.
    """

    module: nn.Embedding
    form: ClassVar[Form] = "diagonal"
    why: ClassVar[str] = "one-hot inputs make A diagonal: the relative counts of the ids"

    @override
    @property
    def fan_in(self) -> int:
        return self.module.num_embeddings

    @override
    @property
    def fan_out(self) -> int:
        return self.module.embedding_dim

    @property
    def scale(self) -> float:
        """The constant c, in the precision that the weight has now."""
        if type(self.module).forward is nn.Embedding.forward:
            return 1.0
        return scale_of(self.module) or 1.0

    @override
    def activation_rows(self, entered: Tensor) -> Tensor:
        # return the ids of every position, which stand for one-hot rows
        return entered.reshape(-1)

    @override
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        # return the gradient of every position's stored vector
        rows, scale = gradient.reshape(-1, gradient.shape[-1]), self.scale
        return rows if scale == 1.0 else rows * scale

    @override
    def batch_first(self, entered: Tensor, examples: int) -> bool:
        if entered.ndim == 1:
            return entered.shape[0] % examples == 0
        return entered.shape[0] == examples


def treats_embedding(module: nn.Embedding) -> str | None:
    """Tell why an embedding cannot be treated."""
    if module.max_norm is not None:
        return "embedding_renormalised"
    if module.scale_grad_by_freq:
        # its gradient of an example is none of one-hot rows: the operation shows it
        return "unsupported_layer"
    if type(module).forward is not nn.Embedding.forward and scale_of(module) is None:
        return "overridden_forward"
    return None
