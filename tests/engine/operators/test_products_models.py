"""Exact products of models that hide a derivative: which route they take, what is refused, and by what name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.collect import collect_or_read
from engine.errors import ModelRefused
from engine.model.batches import Batch
from engine.operators.exact.forward_route import ForwardRoute
from engine.operators.kronecker.layer_store import OperatorOptions
from engine.operators.kronecker_operator import KroneckerOperator
from engine.operators.products import Curvature
from tests.engine.operators.test_products_exact import (
    exact,
    example_matrices,
    numbers,
    product,
    size_of,
    targets_of,
    vectors,
)  # fmt: skip
from tests.oracles import relative_error, workspace

EXACT = 1e-10


class Around(nn.Module):
    """A layer, a function, a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(3, 4), nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.function(self.first(x)))
        return found


def around(function: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = Around(function).double(), numbers(3)
    return model, x, targets_of(model, x, "cross_entropy")


class Once(torch.autograd.Function):
    """A square whose gradient has none of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def straight_through(x: Tensor) -> Tensor:
    """Rounded to eighths, with the gradient of no rounding."""
    return Rounded.apply(x)  # type: ignore[no-any-return]


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient


def written(x: Tensor) -> Tensor:
    """Parts written to memory that had none, one of them twice, and read through an older view."""
    whole = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype)
    whole[..., 1] = x[..., 0].sin()
    older = whole[..., :3]
    whole[..., 2:] = x[..., 2:]
    older.mul_(x[..., :3])
    whole[..., 3].add_(x[..., 3])
    whole[..., 0] += x[..., 1]
    return whole + torch.cat([older, older[..., :1]], -1)


def cut(x: Tensor) -> Tensor:
    """Parts that no gradient passes."""
    with torch.no_grad():
        scale = x.abs().mean() + 1
    return x.tanh() / scale.clone() + x.detach().cos()


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda y: y.tanh() * y.sigmoid(), x, use_reentrant=False)  # type: ignore[no-any-return]


def various(x: Tensor) -> Tensor:
    """Operations that go by torch's own formulas."""
    y = nn.functional.layer_norm(x, (4,)) + nn.functional.group_norm(x, 2)
    y = torch.einsum("nc,nd->ncd", y, x).logsumexp(-1) + x.cumsum(-1).clamp(-1, 1)
    return torch.where(y > 0, y.exp(), y**3) + x.sort(-1).values + (x @ x.mT @ x).div(x.norm()) - x.square().mean()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "written": written, "cut": cut, "checkpointed": checkpointed, "various": various,
}  # fmt: skip


@pytest.mark.part(of=24, by=("of",))
@pytest.mark.parametrize("of", ["ggn", "hessian", "empirical"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_model_moves_forward_as_its_gradient_says(name: str, of: Curvature) -> None:
    model, x, y = around(FUNCTIONS[name])
    # one batch: some of these functions mix examples
    space = workspace(model, [(x, y)], "classification", batch_size=9)
    parameters, v = list(model.parameters()), vectors(size_of(model), 2)
    found = exact(space, of)
    with found.prepared():
        products = found.product(v)
    assert found.learnt.route is None
    f = model(x)
    width = f.shape[-1]
    if of == "hessian":
        loss = nn.functional.cross_entropy(f, y)
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, create_graph=True)])
        rows = [torch.autograd.grad(own, parameters, retain_graph=True) for own in gradient]
        truth = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])
    else:
        rows = [torch.autograd.grad(own, parameters, retain_graph=True) for own in f.reshape(-1)]
        jacobian = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows]).view(9, width, -1)
        chances = torch.softmax(f.detach(), -1)
        middle = torch.diag_embed(chances) - chances[:, :, None] * chances[:, None]
        if of == "empirical":
            observed = chances - nn.functional.one_hot(y, width)
            middle = observed[:, :, None] * observed[:, None]
        truth = torch.einsum("nip,nij,njq->pq", jacobian, middle, jacobian) / 9
    assert relative_error(products, truth @ v) < EXACT


def test_a_function_without_a_second_gradient_has_a_gauss_newton_and_no_hessian() -> None:
    model, x, y = around(Once.apply)
    plain, _, _ = around(torch.square)
    plain.load_state_dict(model.state_dict())
    space = workspace(model, [(x, y)], "classification", batch_size=9)
    v = vectors(size_of(model), 1)
    matrix = torch.stack(example_matrices(plain, x, y, space.inputs.task, "ggn", range(9))).mean(0)
    assert relative_error(product(space, "ggn", v), matrix @ v) < EXACT
    with pytest.raises(ModelRefused, match="differentiated twice"):
        product(space, "hessian", v)


def test_a_rounding_that_gradients_pass_straight_through_goes_by_second_gradients() -> None:
    model, x, y = around(straight_through)
    heard: list[str] = []
    space = workspace(model, [(x, y)], "classification", batch_size=9)
    space.ports.log = lambda _, message: heard.append(message)
    found = exact(space, "ggn")
    v = vectors(size_of(model), 2)
    with found.prepared():
        products = found.product(v)
        assert torch.equal(found.product(v), products)
    assert found.learnt.route is not None
    assert len([message for message in heard if "second gradients" in message]) == 1
    f = model(x)
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(own, parameters, retain_graph=True) for own in f.reshape(-1)]
    jacobian = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows]).view(9, 3, -1)
    chances = torch.softmax(f.detach(), -1)
    middle = torch.diag_embed(chances) - chances[:, :, None] * chances[:, None]
    assert relative_error(products, torch.einsum("nip,nij,njq->pq", jacobian, middle, jacobian) @ v / 9) < EXACT


def test_what_neither_route_differentiates_is_refused_by_its_name() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.EmbeddingBag(7, 4, mode="max"), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.head(self.table(ids))
            return found

    torch.manual_seed(0)
    model = Bags().double()
    x, y = torch.randint(0, 7, (9, 3)), torch.randint(0, 3, (9,))
    space = workspace(model, [(x, y)], "classification")
    with pytest.raises(ModelRefused, match="_embedding_bag"):
        product(space, "ggn", vectors(size_of(model), 1))


def test_two_products_are_equal_to_the_last_bit() -> None:
    model, x, y = around(torch.tanh)
    v = vectors(size_of(model), 3)
    for of in ("ggn", "hessian", "fisher", "empirical"):
        space = workspace(model, [(x, y)], "classification", batch_size=4)
        assert torch.equal(product(space, of, v, updates=3), product(space, of, v, updates=3))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kfac_is_the_gauss_newton_of_deep_linear_nets(sharing: str) -> None:
    class Linears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layers(x)
            # expand: each position has a loss term of its own; reduce: their mean has one
            return found if sharing == "expand" else found.mean(1)

    torch.manual_seed(0)
    model, x = Linears().double(), numbers(5, 3)
    y = targets_of(model, x, "mse")
    space = workspace(model, [(x, y)], "regression", "mse", batch_size=9, sharing=sharing)
    factors = collect_or_read(space)
    assert factors.parameters is not None
    # the diagonal blocks alone are K-FAC's: one layer moves, and its own rows are looked at
    operator, found = KroneckerOperator(factors, OperatorOptions(kind="none")), exact(space, "ggn")
    offset = 0
    with found.prepared():
        for count in (16, 8, 9):
            v = torch.zeros(33, 2, dtype=torch.float64)
            v[offset : offset + count] = vectors(count, 2)
            rows = slice(offset, offset + count)
            assert relative_error(operator.matvec(v)[rows], found.product(v)[rows]) < EXACT
            offset += count


def test_columns_that_memory_parts_are_those_that_went_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = around(torch.tanh)
    v = vectors(size_of(model), 7)
    together = product(workspace(model, [(x, y)], "classification", batch_size=4), "ggn", v, updates=3)
    sizes: list[int] = []
    real = ForwardRoute.products

    def counted(self: ForwardRoute, batch: Batch, parameters: Any, columns: Any) -> Any:
        sizes.append(len(columns))
        return real(self, batch, parameters, columns)

    monkeypatch.setattr(ForwardRoute, "products", counted)
    space = workspace(model, [(x, y)], "classification", batch_size=4)
    # two vectors of 31 numbers, and two outputs of 12, of eight bytes each, three times over, are a quarter
    monkeypatch.setattr(type(space.machine.guard), "free_bytes", lambda self, place: 4 * 3 * 8 * (2 * 12 + 2 * 31))
    assert torch.equal(product(space, "ggn", v, updates=3), together)
    assert sizes == [3, 3, 1] * 3
