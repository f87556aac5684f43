"""Tables that scale what they look up: c is found by trial, and the factors are those of plain hooks on W[ids]."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.layers.embedding import scale_of
from tests.oracles import collect, relative_error, require_traces

EXACT = 1e-12


class Scaled(nn.Embedding):
    """Gemma's: a buffer that takes the weight's precision."""

    def __init__(self, *sizes: int, scale: float = 3.7, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.register_buffer("own_scale", torch.tensor(scale, dtype=torch.float64), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.own_scale.to(self.weight.dtype)


class Language(nn.Module):
    """A scaled table and a head, of one weight or of two."""

    def __init__(self, *, tied: bool, padding: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = Scaled(9, 4, padding_idx=padding)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.table(ids))))


def rows_of(model: Language, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each example alone: the head's inputs and output gradients, and the gradients of ``W[ids]`` itself."""
    entered, left, looked_up = [], [], []
    for one in ids:
        vectors = model.table.weight.detach()[one].requires_grad_()
        a = torch.tanh(model.inner(vectors * 3.7))
        outputs = functional.linear(a, model.head.weight)
        loss = functional.cross_entropy(outputs[:-1], one[1:], reduction="sum")
        g, v = torch.autograd.grad(loss, (outputs, vectors))
        entered.append(a.detach())
        left.append(g)
        looked_up.append(v)
    return torch.cat(entered), torch.cat(left), torch.cat(looked_up)


@pytest.mark.parametrize("padding", [None, 3])
def test_a_scaled_table_has_the_factors_of_its_vectors(padding: int | None) -> None:
    model = Language(tied=False, padding=padding)
    ids = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(1))
    whole = collect(model, [(ids, ids)], "causal_lm", fisher="empirical", min_coverage=1.0, self_check="growing")
    table = whole.layers[0]
    _, _, vectors = rows_of(model, ids)
    real = ids.flatten() != (-1 if padding is None else padding)
    counts = torch.bincount(ids.flatten()[real], minlength=9).double()
    factors = whole.load(0)
    assert (table.name, table.form) == ("table", "diagonal")
    assert relative_error(factors.A, counts / counts.sum()) < EXACT
    assert relative_error(factors.G, vectors[real].T @ vectors[real] / 24) < EXACT
    assert table.gradient_identity is not None
    assert table.gradient_identity < EXACT


def test_a_scaled_table_that_is_the_heads_weight_is_the_nearest_product_of_both_uses() -> None:
    model = Language(tied=True)
    ids = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(1))
    whole = collect(model, [(ids, ids)], "causal_lm", fisher="empirical", min_coverage=1.0)
    a, g, vectors = rows_of(model, ids)
    counts = torch.bincount(ids.flatten(), minlength=9).double() / 30
    truth = torch.einsum("ij,kl->ikjl", g.T @ g / 24, a.T @ a / 30)
    truth += torch.einsum("ij,kl->ikjl", torch.diag(counts), vectors.T @ vectors / 24)
    left, sizes, right = torch.linalg.svd(truth.permute(0, 2, 1, 3).reshape(81, 16))
    nearest = sizes[0] * torch.einsum("ij,kl->ikjl", left[:, 0].view(9, 9), right[0].view(4, 4))
    nearest *= torch.einsum("ikik->", truth) / torch.einsum("ikik->", nearest)
    factors = whole.load(0)
    assert (whole.layers[0].name, whole.layers[0].form) == ("table", "kronecker")
    assert relative_error(torch.einsum("ij,kl->ikjl", factors.G, factors.A), nearest) < 1e-11
    assert whole.covered_parameters == sum(each.numel() for each in model.parameters())
    losses = (functional.cross_entropy(model(one[None])[0, :-1], one[1:], reduction="sum") for one in ids)
    require_traces(model, whole, losses, 24)


def test_the_scale_is_found_by_trial_and_only_where_there_is_one() -> None:
    class Shifted(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward((ids + 1) % self.num_embeddings)

    class Reversed(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return 2 * super().forward(ids).flip(-1)

    class Normalised(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return functional.normalize(super().forward(ids), dim=-1)

    class Positions(nn.Embedding):
        def forward(self, ids: Tensor, past: int = 0) -> Tensor:
            return super().forward(torch.arange(past, past + ids.shape[1]).expand_as(ids) + 2)

    class Learned(Scaled):
        def __init__(self) -> None:
            super().__init__(7, 5)
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * self.gain

    scaled = Scaled(7, 5, scale=0.3)
    weight = scaled.weight
    assert scale_of(scaled) == pytest.approx(0.3, rel=1e-7)
    assert scale_of(scaled.double()) == 0.3
    assert scaled.weight is weight
    assert scale_of(nn.Embedding(7, 5)) == 1.0
    assert [scale_of(kind(7, 5)) for kind in (Shifted, Reversed, Normalised, Positions)] == [None] * 4
    assert scale_of(Learned()) is None
    with torch.device("meta"):
        assert scale_of(Scaled(7, 5)) is not None
        assert scale_of(Positions(7, 5)) is None
