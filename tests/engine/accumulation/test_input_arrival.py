"""A holds the inputs of the calls that get a gradient: compared with plain hooks, which see calls and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.collect import collect_or_read
from engine.collection import checkpoints
from engine.collection.checkpoints import MANIFEST
from engine.factors.factor_set import FactorSet
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, relative_error, require_traces, workspace

WIDTH = 4
Chunk = tuple[Tensor, Tensor]


class Toy(nn.Module):
    """Layers of one width, and a function of them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def detached(model: Toy, x: Tensor) -> Tensor:
    scale = model.stem(2 * x).norm(dim=-1, keepdim=True).detach()
    return model.head(model.keys(model.stem(x).tanh()).tanh() / (1 + scale / 100))


def stepwise(model: Toy, x: Tensor) -> Tensor:
    kept, query = [], x
    for step in x.unbind(1):
        query, key = model.stem(step), model.keys(step)
        kept.append((key, model.values(step)))
    keys, values = (torch.stack(each, 1) for each in zip(*kept, strict=True))
    weights = (keys @ query[..., None]).softmax(1)
    return model.head((weights * values).sum(1))


def unread(model: Toy, x: Tensor) -> Tensor:
    model.keys(3 * x)
    return model.head(model.keys(model.stem(x).tanh()).tanh())


def later(model: Toy, x: Tensor) -> Tensor:
    """The first call gets a gradient in batches of positive sums alone."""
    other = model.keys(x * 2)
    hidden = model.keys(model.stem(x).tanh())
    return model.head(hidden + other if bool(x.sum() > 0) else hidden)


def at_first_none(model: Toy, x: Tensor) -> Tensor:
    """One layer gets no gradient at all where the sum is negative."""
    other = model.values(model.stem(x))
    return model.head(model.keys(x) + (other if bool(x.sum() > 0) else other.detach()))


def recomputed(model: Toy, x: Tensor) -> Tensor:
    def part(hidden: Tensor) -> Tensor:
        scale = model.keys(3 * hidden).norm(dim=-1, keepdim=True).detach()
        return model.keys(hidden).tanh() / (1 + scale / 100)

    hidden = model.stem(x)
    return model.head(
        checkpoint(part, hidden, use_reentrant=False) + checkpoint(part, hidden.tanh(), use_reentrant=True)
    )


CASES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a call that is detached": detached,
    "keys kept step by step": stepwise,
    "an output that nothing reads": unread,
    "a call that gets a gradient in some batches": later,
    "a layer whose first batches have no gradient": at_first_none,
    "calls that run again": recomputed,
}


def chunks(run: Callable[[Any, Tensor], Tensor]) -> list[Chunk]:
    torch.manual_seed(1)
    shape = (4, 3, WIDTH) if run is stepwise else (4, WIDTH)
    signs = (-1.0, 1.0, -1.0, 1.0)
    inputs = [sign * torch.randn(shape, dtype=torch.float64).abs() for sign in signs]
    return [(x, torch.randint(0, 3, (4,))) for x in inputs]


def plain(model: nn.Module, data: list[Chunk]) -> dict[str, Tensor]:
    """A of each linear layer: the mean over the rows of all calls whose output gets a gradient."""
    sums: dict[str, list[Tensor]] = {}
    twin = model.double()
    for x, targets in data:
        reached: list[tuple[str, Tensor]] = []

        def watch(name: str, reached: list[tuple[str, Tensor]] = reached) -> Any:
            def after(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
                entered = args[0].detach().clone()
                if output.requires_grad:
                    output.register_hook(lambda _: reached.append((name, entered)))

            return after

        handles = [
            module.register_forward_hook(watch(name))
            for name, module in twin.named_modules()
            if isinstance(module, nn.Linear)
        ]
        functional.cross_entropy(twin(x), targets).backward()
        for handle in handles:
            handle.remove()
        for name, entered in reached:
            sums.setdefault(name, []).append(functional.pad(entered.reshape(-1, WIDTH), (0, 1), value=1.0))
    return {name: (rows := torch.cat(own)).T @ rows / rows.shape[0] for name, own in sums.items()}


def require_same(found: FactorSet, truth: dict[str, Tensor]) -> None:
    covered = {layer.name: layer.ordinal for layer in found.layers}
    assert covered.keys() >= truth.keys()
    for name, expected in truth.items():
        assert relative_error(found.load(covered[name]).A, expected) <= 1e-12, name


def made(run: Callable[[Any, Tensor], Tensor], data: list[Chunk], **options: Any) -> Workspace:
    return workspace(Toy(run), data, "classification", min_coverage=0.0, **{"fisher": "mc"} | options)


@pytest.mark.part(of=32, by=("options",))
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the dry run, of a checkpoint
@pytest.mark.parametrize("options", [{}, {"exact_trace": False}, {"fisher": "type2"}, {"batch_variance": True}])
@pytest.mark.parametrize("name", CASES)
def test_inputs_of_calls_without_a_gradient_do_not_enter(name: str, options: dict[str, Any]) -> None:
    data = chunks(CASES[name])
    require_same(collect_or_read(made(CASES[name], data, **options)), plain(Toy(CASES[name]), data))


def test_it_does_not_depend_on_what_enters_first() -> None:
    data = chunks(later)
    require_same(collect_or_read(made(later, data[::-1])), plain(Toy(later), data))


def test_a_weight_that_is_multiplied_by_hand() -> None:
    def by_hand(model: Toy, x: Tensor) -> Tensor:
        scale = (3 * x @ model.weight).norm(dim=-1, keepdim=True).detach()
        return model.head((model.stem(x).tanh() @ model.weight).tanh() / (1 + scale / 100))

    data = chunks(by_hand)
    found = collect_or_read(made(by_hand, data))
    (layer,) = (each for each in found.layers if each.name == "weight")
    entered = torch.cat([Toy(by_hand).double().stem(x).tanh() for x, _ in data]).detach()
    assert relative_error(found.load(layer.ordinal).A, entered.T @ entered / entered.shape[0]) <= 1e-12


def test_the_inputs_of_a_batch_without_loss_terms_count() -> None:
    data = chunks(detached)
    data[1] = data[1][0], torch.full((4,), -100)
    found = collect_or_read(made(detached, data))
    # ignored targets remove loss terms, never positions: both calls of that batch count
    entered = torch.cat([*(x for x, _ in data), 2 * data[1][0]])
    rows = functional.pad(entered, (0, 1), value=1.0)
    (layer,) = (each for each in found.layers if each.name == "stem")
    assert relative_error(found.load(layer.ordinal).A, rows.T @ rows / rows.shape[0]) <= 1e-12


class Stop(torch.autograd.Function):
    """The identity, without a gradient: autograd calls the hooks before it with None."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> None:
        return None


UNDEFINED: dict[str, Callable[[Any, Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "a layer": lambda s, x, stop: s.head(s.keys(stop(s.stem(x)).tanh())),
    "a layer with another path": lambda s, x, stop: s.head(stop(hidden := s.stem(x)).tanh() + s.keys(hidden)),
    "one of two calls": lambda s, x, stop: s.head(stop(s.stem(x)).tanh() + s.stem(x.sin()).tanh()),
    "a product by hand": lambda s, x, stop: s.head(stop((x @ s.weight).tanh()) + (x.sin() @ s.weight).tanh()),
    "a bare parameter": lambda s, x, stop: s.head(stop(s.stem(x) * s.weight[0]) + x * s.weight[0].exp()),
    "a batch norm": lambda s, x, stop: s.head(stop(s.norm(s.stem(x))).tanh() + s.keys(x)),
    "the head": lambda s, x, stop: stop(s.head(x)) + s.head(s.stem(x).tanh()),
}


@pytest.mark.part(of=28, by=("fisher",))
@pytest.mark.parametrize("fisher", ["empirical", "type2"])
@pytest.mark.parametrize("name", UNDEFINED)
def test_an_undefined_gradient_counts_as_a_detached_output(name: str, fisher: str) -> None:
    def stopped(stop: Callable[[Tensor], Tensor]) -> Toy:
        toy = Toy(lambda model, x: UNDEFINED[name](model, x, stop))
        toy.norm = nn.BatchNorm1d(WIDTH)
        return toy.double().eval()

    (x, y), *_ = chunks(detached)
    found, truth = (
        collect_or_read(workspace(stopped(stop), [(x, y)], "classification", min_coverage=0.0, fisher=fisher))
        for stop in (Stop.apply, Tensor.detach)
    )
    assert [(each.name, each.reason) for each in found.declared] == [(row.name, row.reason) for row in truth.declared]
    assert [layer.name for layer in found.layers] == [layer.name for layer in truth.layers]
    for layer in truth.layers:
        own, other = found.load(layer.ordinal), truth.load(layer.ordinal)
        assert relative_error(own.A, other.A) <= 1e-14, layer.name
        assert relative_error(own.dense_G, other.dense_G) <= 1e-14, layer.name
    if fisher == "empirical":
        model = stopped(Stop.apply)
        losses = (functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(len(x)))
        require_traces(model, found, losses, len(x))


class Killed(Exception):
    pass


def test_an_attempt_that_goes_on_knows_which_inputs_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    data = chunks(detached)
    scratch = MemoryArtifacts()

    def attempt(stop_after: int | None) -> Workspace:
        own = made(detached, data)
        own.ports.scratch, own.inputs.examples = scratch, 16
        own.resume.checkpoint_seconds = 1e-9
        asked = 0

        def raise_if_cancelled() -> None:
            nonlocal asked
            asked += 1
            if stop_after is not None and asked > stop_after:
                raise Killed

        own.ports.raise_if_cancelled = raise_if_cancelled
        return own

    with pytest.raises(Killed):
        collect_or_read(attempt(4))
    assert scratch.load_json(MANIFEST)["body"]["state"]["fields"]["deferred"] == ["stem"]
    resumed = attempt(None)
    found = collect_or_read(resumed)
    require_same(found, plain(Toy(detached), data))
    assert found.passes == 2
