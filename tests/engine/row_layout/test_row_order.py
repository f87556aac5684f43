"""Rows that stand flat, several for each example, are put in the examples' order, or only their sums are used.

The oracle runs every example alone in plain autograd, with plain hooks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.factors.factor_set import FactorSet
from engine.layers.coverage import survey
from engine.model.batches import Batch
from engine.planning import probe_model
from engine.row_layout.layer_calls import Call, record_calls
from engine.row_layout.row_order import RowOrders, find_row_orders
from tests.oracles import collect, relative_error

EXACT = 1e-10
N, T, WIDTH = 6, 3, 4


class Towers(nn.Module):
    """A tower of layers on flat rows, in an order of the ``kind``'s own; examples do not mix."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.table = nn.Embedding(9, WIDTH)
        self.first = nn.Linear(WIDTH, 5)
        self.norm = nn.LayerNorm(5)
        self.second = nn.Linear(5, 4, bias=False)
        self.head = nn.Linear(4, 3)
        self.double()

    def tower(self, rows: Tensor) -> Tensor:
        return self.second(self.norm(self.first(rows).tanh())).tanh()

    def weighed(self, rows: Tensor) -> Tensor:
        """One output of each example's rows (N, T, d), of which no two count alike."""
        return self.head((rows * torch.arange(1, rows.shape[1] + 1).view(-1, 1)).sum(1))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        examples, first = x.shape[0], x[:, 0]
        # longest texts first: an order that depends on the data
        order = torch.argsort(ids[:, 0], stable=True)
        flat = x.flatten(0, 1)
        rows, by_position = {
            "siamese": lambda: (torch.cat([first, x[:, 1]]), True),
            "flipped": lambda: (torch.cat([first, first.flip(-1)]), True),
            "time major": lambda: (x.transpose(0, 1).reshape(-1, WIDTH), True),
            "transposed ids": lambda: (self.table(ids.T.reshape(-1)), True),
            "repeated": lambda: (first.repeat_interleave(T, 0) + flat, False),
            # hand-written statistics of the batch
            "mixed": lambda: (flat - flat.mean(0), False),
            "packed": lambda: (torch.cat([x[row] for row in order]), False),
            # the same, by an operation that is not followed
            "taken": lambda: (x.take(order[:, None] * T * WIDTH + torch.arange(T * WIDTH)).view(-1, WIDTH), False),
        }[self.kind]()
        rows = self.tower(rows)
        grouped = rows.view(-1, examples, 4).transpose(0, 1) if by_position else rows.view(examples, -1, 4)
        return self.weighed(grouped[torch.argsort(order)] if self.kind in ("packed", "taken") else grouped)


def data() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(N, T, WIDTH, dtype=torch.float64)
    return x, torch.tensor([[5, 1, 2], [3, 3, 0], [8, 4, 4], [1, 7, 6], [2, 2, 8], [7, 0, 1]]), torch.arange(N) % 3


def plain(model: nn.Module, x: Tensor, ids: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor, float]]:
    """A and G (divided by rows and examples) and the exact trace of each layer, from each example alone."""
    entered: dict[str, list[Tensor]] = {}
    outputs: dict[str, list[Tensor]] = {}
    traces: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            output.retain_grad()
            entered.setdefault(name, []).append(args[0].detach())
            outputs.setdefault(name, []).append(output)

        return after

    layers = dict(model.named_children())
    handles = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    for n in range(N):
        model.zero_grad()
        functional.cross_entropy(model(x[n : n + 1], ids[n : n + 1]), y[n : n + 1]).backward()
        for name, layer in layers.items():
            own = [each.grad for each in layer.parameters() if each.grad is not None]
            traces[name] = traces.get(name, 0.0) + sum(float(each.square().sum()) for each in own) / N
    for handle in handles:
        handle.remove()
    found = {}
    for name, own_rows in entered.items():
        rows, layer = torch.cat(own_rows), layers[name]
        g = torch.cat([each.grad for each in outputs[name] if each.grad is not None])
        if isinstance(layer, nn.Embedding):
            A = torch.bincount(rows.reshape(-1), minlength=9).double() / rows.numel()
        else:
            bias = isinstance(layer, nn.Linear) and layer.bias is not None
            a = torch.cat([rows, torch.ones(rows.shape[0], 1, dtype=rows.dtype)], 1) if bias else rows
            A = a.T @ a / a.shape[0]
        found[name] = A, g.T @ g / N, traces[name]
    return found


def measured(kind: str, **options: Any) -> tuple[FactorSet, dict[str, tuple[Tensor, Tensor, float]]]:
    model, (x, ids, y) = Towers(kind), data()
    options = {"fisher": "empirical", "batch_size": 3} | options
    return collect(model, [((x, ids), y)], "classification", **options), plain(model, x, ids, y)


ORDERED = ["siamese", "flipped", "time major", "repeated", "transposed ids"]


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("kind", ORDERED)
def test_flat_rows_are_put_in_the_order_of_the_examples(kind: str) -> None:
    whole, truth = measured(kind)
    assert {layer.name for layer in whole.layers} == truth.keys()
    for layer in whole.layers:
        A, G, trace = truth[layer.name]
        assert layer.exact_trace == pytest.approx(trace, rel=EXACT), layer.name
        if layer.form == "block":
            continue
        assert relative_error(whole.load(layer.ordinal).A, A) < EXACT, layer.name
        assert relative_error(whole.load(layer.ordinal).dense_G, G) < EXACT, layer.name


def test_rows_that_other_examples_change_are_not_taken_for_rows_in_another_order() -> None:
    model, (x, ids, _) = Towers("mixed"), data()
    own = survey(model)

    def run(batch: Batch) -> tuple[list[Call], list[Tensor]]:
        with torch.no_grad(), record_calls(own.treated, batch.size) as calls:
            returned = model(*batch.inputs)
        return calls, [returned]

    whole = Batch(inputs=(x, ids), targets=None, index=torch.arange(N))
    calls, _ = run(whole)
    assert find_row_orders(whole, calls, N, run) == RowOrders()


@pytest.mark.parametrize("kind", ["siamese", "time major", "transposed ids"])
def test_without_the_trial_the_traces_are_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_model, "find_row_orders", lambda *_: RowOrders())
    whole, truth = measured(kind, self_check="off")
    errors = [abs((layer.exact_trace or 0) / truth[layer.name][2] - 1) for layer in whole.layers]
    assert max(errors) > 0.01


@pytest.mark.parametrize("sharing", ["reduce", "expand"])
def test_rows_that_a_loop_packs_have_their_traces(sharing: str) -> None:
    whole, truth = measured("packed", sharing=sharing)
    assert {row.name for row in whole.declared} == {"table"}
    traces = {layer.name: layer.exact_trace or 0.0 for layer in whole.layers}
    # a row of its own for the bias of a norm
    traces["norm"] += traces.pop("norm.bias")
    for name, trace in traces.items():
        assert trace == pytest.approx(truth[name][2], rel=EXACT), name
    for layer in whole.layers:
        if sharing == "expand" and layer.form == "kronecker":
            assert relative_error(whole.load(layer.ordinal).A, truth[layer.name][0]) < EXACT, layer.name
            assert relative_error(whole.load(layer.ordinal).dense_G, truth[layer.name][1]) < EXACT, layer.name


@pytest.mark.part(of=16, by=("ekfac",))
@pytest.mark.parametrize("sharing", ["reduce", "expand"])
@pytest.mark.parametrize("ekfac", [False, True])
def test_rows_in_an_order_of_their_own_are_summed_and_have_no_trace(sharing: str, ekfac: bool) -> None:
    whole, truth = measured("taken", sharing=sharing, ekfac=ekfac)
    names = {layer.name for layer in whole.layers}
    for layer in whole.layers:
        A, G, trace = truth[layer.name]
        if layer.name == "head" or layer.form != "kronecker":
            assert layer.exact_trace == pytest.approx(trace, rel=EXACT), layer.name
            continue
        if layer.exact_trace is None:
            assert "no exact trace" in layer.why
        else:
            assert layer.exact_trace == pytest.approx(trace, rel=EXACT), layer.name
        if sharing == "expand":
            assert relative_error(whole.load(layer.ordinal).A, A) < EXACT, layer.name
            assert relative_error(whole.load(layer.ordinal).dense_G, G) < EXACT, layer.name
    assert "head" in names
    if sharing == "expand" and not ekfac:
        assert {"first", "second"} <= names
    # a norm has a block, which needs each example's rows however the others are summed
    refused = {row.name: row.reason for row in whole.declared if row.name != "table"}
    assert refused == dict.fromkeys({"first", "norm", "second"} - names, "rows_unordered")
