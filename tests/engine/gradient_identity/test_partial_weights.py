"""A weight of which the model uses a part is checked in every batch as it is in the first one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.collect import collect_or_read
from engine.collection.first_check import subject_of
from engine.collection.pass_job import PassJob
from engine.factors.factor_set import FactorSet
from engine.gradient_identity.checked_model import Forward
from engine.gradient_identity.findings import watch_unused
from engine.gradient_identity.reference import Objective, pull_back
from tests.oracles import workspace

Head = Callable[["Padded", Tensor], Tensor]

EXAMPLES, RARE = 16, 13
CLASSES = 5


class Padded(nn.Module):
    """A layer, and a head of 9 rows of which 5 are classes; ``head`` returns the outputs."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.w, self.head = nn.Linear(6, 8), nn.Linear(8, 9), head
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self, self.a(x).tanh())


def first_rows(net: Padded, hidden: Tensor) -> Tensor:
    return functional.linear(hidden, net.w.weight[:CLASSES])


def rows_and_bias(net: Padded, hidden: Tensor) -> Tensor:
    return functional.linear(hidden, net.w.weight[:CLASSES], net.w.bias[:CLASSES])


def two_parts(net: Padded, hidden: Tensor) -> Tensor:
    """Two parts, which leave a row between them."""
    left, right = functional.linear(hidden, net.w.weight[:3]), functional.linear(hidden, net.w.weight[4:6])
    return torch.cat([left, right], 1)


def _hidden_use(net: Padded, hidden: Tensor) -> Tensor:
    """A use of the last rows that no mode of torch's functions sees."""
    with torch._C.DisableTorchFunction():
        return functional.linear(hidden, net.w.weight[CLASSES:]).sum(1, keepdim=True) * torch.arange(CLASSES)


def always_hidden(net: Padded, hidden: Tensor) -> Tensor:
    return first_rows(net, hidden) + _hidden_use(net, hidden)


def rarely_hidden(net: Padded, hidden: Tensor) -> Tensor:
    """The same for examples with a large input, which one batch has."""
    rows = []
    for place in range(len(hidden)):
        one = hidden[place : place + 1]
        outputs = first_rows(net, one)
        rows.append(outputs + _hidden_use(net, one) if float(one.detach().abs().amin()) > 0.5 else outputs)
    return torch.cat(rows)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 6, dtype=torch.float64, generator=generator).clamp(-1, 1)
    x[RARE] = 40.0
    return x, torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def measured(head: Head, batch_size: int, self_check: str = "growing", dtype: str = "float64") -> FactorSet:
    options: dict[str, Any] = {
        "fisher": "empirical",
        "batch_size": batch_size,
        "self_check": self_check,
        "dtype": dtype,
    }
    return collect_or_read(workspace(Padded(head), [data()], "classification", **options))


def gradients(head: Head, name: str) -> Tensor:
    """Plain gradients of one parameter, of each example alone, shape (N, …)."""
    net, (x, y) = Padded(head), data()
    losses = [functional.cross_entropy(net(x[n : n + 1]), y[n : n + 1]) for n in range(len(x))]
    return torch.stack([torch.autograd.grad(loss, net.get_parameter(name))[0] for loss in losses])


PARTS: dict[str, tuple[Head, dict[str, dict[str, slice]], int]] = {
    "rows": (first_rows, {"w.weight[0:5]": {"w.weight": slice(0, 5)}}, 32 + 9),
    "rows and bias": (
        rows_and_bias,
        {"w.weight[0:5]": {"w.weight": slice(0, 5), "w.bias": slice(0, 5)}},
        32 + 4,
    ),
    "two parts": (
        two_parts,
        {"w.weight[0:3]": {"w.weight": slice(0, 3)}, "w.weight[4:6]": {"w.weight": slice(4, 6)}},
        32 + 9,
    ),
}


@pytest.mark.part(of=24, by=("case",))
@pytest.mark.parametrize("batch_size", [16, 8, 4])
@pytest.mark.parametrize("self_check", ["growing", "first"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", PARTS)
def test_the_used_part_is_covered_and_the_rest_has_no_gradient(
    case: str, dtype: str, self_check: str, batch_size: int
) -> None:
    head, parts, missing = PARTS[case]
    whole = measured(head, batch_size, self_check, dtype)
    layers = {layer.name: layer for layer in whole.layers}
    assert layers.keys() == {"a", *parts}
    for name, own in parts.items():
        squares = sum(gradients(head, parameter)[:, rows].square().sum() for parameter, rows in own.items())
        tolerance = 1e-10 if dtype == "float64" else 1e-5
        assert layers[name].exact_trace == pytest.approx(float(squares) / EXAMPLES, rel=tolerance)
        assert layers[name].gradient_identity == pytest.approx(0, abs=1e-4 if dtype == "float32" else 1e-12)
    assert {row.reason for row in whole.declared} == {"no_gradient"}
    assert sum(row.parameter_count for row in whole.declared) == missing


@pytest.mark.parametrize("self_check", ["growing", "first"])
@pytest.mark.parametrize(("head", "batch_size"), [(always_hidden, 16), (always_hidden, 4), (rarely_hidden, 4)])
def test_a_rest_with_a_gradient_that_no_operation_brought_is_refused(
    head: Head, batch_size: int, self_check: str
) -> None:
    plain = gradients(head, "w.weight")
    reached = plain[:, CLASSES:].flatten(1).any(1)
    assert int(reached.sum()) == (1 if head is rarely_hidden else EXAMPLES)
    whole = measured(head, batch_size, self_check)
    assert {row.reason for row in whole.declared if "w.weight" in row.parameters} == {"gradient_not_followed"}
    layers = {layer.name: layer for layer in whole.layers}
    squares = float(plain[:, :CLASSES].square().sum())
    assert layers["w.weight[0:5]"].exact_trace == pytest.approx(squares / EXAMPLES, rel=1e-10)


def test_a_pullback_runs_no_hook_of_others_and_leaves_them_in_place() -> None:
    made = workspace(Padded(first_rows), [data()], "classification", fisher="empirical", batch_size=EXAMPLES)
    job = PassJob.of(made, torch.device("cpu"))
    batch, weight = job.probed_batch(), job.model.get_parameter("w.weight")
    cotangent = torch.ones(batch.size, 1, CLASSES, dtype=torch.float64)
    (plain,) = torch.autograd.grad(job.model(data()[0]).sum(), weight)
    calls: list[str] = []
    arrived: list[Tensor] = []
    earlier = weight.register_post_accumulate_grad_hook(lambda _: calls.append("earlier"))  # type: ignore[no-untyped-call]
    with watch_unused({"w.weight": weight}, calls.append):
        objective = Objective(forward=Forward(batch=batch, start=0), cotangent=cotangent)
        pull_back(subject_of(job), [weight], objective, lambda _, gradient: arrived.append(gradient))
        assert calls == []
        job.model(data()[0]).sum().backward()
    job.model(data()[0]).sum().backward()
    assert calls == ["earlier", "w.weight", "earlier"]
    torch.testing.assert_close(arrived, [plain], rtol=1e-12, atol=0)
    earlier.remove()
