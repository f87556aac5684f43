"""A model is after a measurement what it was before, whatever its forward pass leaves behind and whatever ends it."""

import collections
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.collection.checkpoints import fingerprint
from engine.errors import ModelChanged
from engine.model.state import model_state
from engine.model.state.preserve_state import preserve_state
from tests.oracles import collect, require_traces


class Weighed(nn.Module):
    """A matrix that a test's subclass multiplies by."""

    stored: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 6))
        self.held: dict[str, Tensor] = {}
        self.extra, self.plain = types.SimpleNamespace(queue=collections.deque(), seen=set()), torch.zeros(16, 8)
        self.count = 0
        self.register_buffer("stored", torch.zeros(16, 8))


class Slots:
    __slots__ = ("w",)
    w: Tensor | None


KEPT: dict[str, Tensor] = {}
KEPT_ALONE: Tensor | None = None


class InDictionary(Weighed):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.held.setdefault("w", self.w * 1.0).T


class InAttribute(Weighed):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "effective"):
            self.effective = self.w * 1.0
        return x @ self.effective.T


class InClass(Weighed):
    cache: dict[str, Tensor] = {}  # noqa: RUF012 - the fault that is tested

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.cache.setdefault("w", self.w * 1.0).T


class InModule(Weighed):
    def forward(self, x: Tensor) -> Tensor:
        return x @ KEPT.setdefault("w", self.w * 1.0).T


class InVariable(Weighed):
    def forward(self, x: Tensor) -> Tensor:
        global KEPT_ALONE  # noqa: PLW0603 - likewise
        KEPT_ALONE = self.w * 1.0 if KEPT_ALONE is None else KEPT_ALONE
        return x @ KEPT_ALONE.T


class InDefault(Weighed):
    def forward(self, x: Tensor, cache: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006 - likewise
        return x @ cache.setdefault("w", self.w * 1.0).T


class Memoised(Weighed):
    @functools.cache  # noqa: B019 - likewise
    def effective(self) -> Tensor:
        return self.w * 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.effective().T


class InProperty(Weighed):
    @functools.cached_property
    def effective(self) -> Tensor:
        return self.w * 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.effective.T


class InSlots(Weighed):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.slots, "w"):
            self.slots.w = self.w * 1.0
        self.extra.queue.append(x)
        self.extra.seen.add(len(self.extra.queue))
        assert self.slots.w is not None
        return x @ self.slots.w.T


class InBuffer(Weighed):
    def forward(self, x: Tensor) -> Tensor:
        left = x @ self.w.T
        self.stored[: len(x)] = left
        self.plain = self.plain.to(left)
        self.plain[: len(x)] = left
        return self.stored[: len(x)] + self.plain[: len(x)].sin()


class Counting(Weighed):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.stored.add_(1)
        return x @ self.w.T * self.count * self.stored[0, 0]


class Untidy(Weighed):
    """Flags, modes, hooks, gradients, generators."""

    def forward(self, x: Tensor) -> Tensor:
        self.train()
        self.register_forward_pre_hook(lambda *_: None)
        self.register_buffer("another", torch.ones(()))
        self.w.grad = torch.ones_like(self.w)
        random.random()
        torch.manual_seed(3)
        return x @ self.w.T


def enclosed() -> nn.Module:
    kept: Tensor | None = None

    class InClosure(Weighed):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal kept
            kept = self.w * 1.0 if kept is None else kept
            return x @ kept.T

    return InClosure()


FORGETFUL = [
    InDictionary, InAttribute, InClass, InModule, InVariable, InDefault, Memoised, InProperty, InSlots, InBuffer,
    Counting, Untidy, enclosed,
]  # fmt: skip


class Merging(nn.Linear):
    """Adds a product of small matrices to its weight in evaluation."""

    def __init__(self) -> None:
        super().__init__(6, 8)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(8, 2))
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.up.data @ self.down.data
            self.merged = not mode
        return self


def chain(first: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(6, 6, dtype=torch.float64, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a test can see of a model, with the identity of all that is no number."""
    seen: dict[str, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen[name] = (id(tensor), tensor.detach().clone().numpy().tobytes(), tensor.requires_grad, tensor.grad)
    for path, module in model.named_modules():
        own = vars(module)
        seen[f"{path}|"] = {key: id(value) for key, value in own.items()}
        seen[f"{path}#"] = {key: list(value) for key, value in own.items() if isinstance(value, (dict, set))}
        extra = own.get("extra")
        seen[f"{path}+"] = None if extra is None else (list(extra.queue), set(extra.seen))
    seen["generators"] = torch.get_rng_state().numpy().tobytes(), random.getstate()
    return seen


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize(
    ("make", "dtype"),
    [*((make, "float64") for make in FORGETFUL), (InDictionary, "float32"), (InBuffer, "float32"), (Untidy, "float32")],
)
def test_what_a_forward_pass_leaves_behind_is_gone_and_hides_no_layer(
    make: Callable[[], nn.Module], dtype: str
) -> None:
    model, (x, y) = chain(make()), data()
    before = state(model)
    whole = collect(model, [(x, y)], "classification", fisher="empirical", dtype=dtype)
    assert state(model) == before
    assert [layer.name for layer in whole.declared] == []
    if dtype == "float64" and make is not Counting:

        def loss(row: int) -> Tensor:
            left = x[row : row + 1] @ model[0].get_parameter("w").T
            left = left + left.sin() if make is InBuffer else left
            return functional.cross_entropy(model[2](torch.tanh(left)), y[row : row + 1])

        require_traces(model, whole, (loss(row) for row in range(6)), 6)
    assert not KEPT
    assert KEPT_ALONE is None


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_weights_that_are_merged_for_evaluation_come_back_to_the_bit(dtype: str) -> None:
    model, (x, y) = chain(Merging()), data()
    before = state(model)
    collect(model, [(x, y)], "classification", dtype=dtype)
    assert state(model) == before
    model.eval()
    before = state(model)
    collect(model, [(x, y)], "classification", dtype=dtype)
    assert state(model) == before


@pytest.mark.part(of=24, by=("way",))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("way", ["replaced", "written", "written past autograd", "turned round", "added"])
def test_a_parameter_that_moves_is_named_and_put_back(way: str, dtype: str) -> None:
    class Moving(Weighed):
        def forward(self, x: Tensor) -> Tensor:
            if way == "replaced":
                self.w = nn.Parameter(self.w.detach().clone())
            elif way == "written":
                with torch.no_grad():
                    self.w.mul_(0.5)
            elif way == "written past autograd":
                self.w.data.mul_(0.5)
            elif way == "turned round":
                with torch.no_grad():
                    self.w.copy_(self.w.flip(0))
            elif not hasattr(self, "late"):
                self.late = nn.Linear(8, 8, dtype=x.dtype)
            left = x @ self.w.T
            return self.late(left) if hasattr(self, "late") else left

    model, (x, y) = chain(Moving()), data()
    before = state(model)
    with pytest.raises(ModelChanged, match=r"`0\.(w|late\.bias)`"):
        collect(model, [(x, y)], "classification", dtype=dtype)
    assert state(model) == before


def test_a_write_that_changes_nothing_is_no_move() -> None:
    class Bounded(Weighed):
        def forward(self, x: Tensor) -> Tensor:
            self.w.data.clamp_(-9, 9)
            return x @ self.w.T

    model, (x, y) = chain(Bounded()), data()
    collect(model, [(x, y)], "classification")


@pytest.mark.parametrize(("at", "kind"), [(1, KeyboardInterrupt), (4, RuntimeError), (10, KeyboardInterrupt)])
def test_whatever_ends_a_measurement_leaves_the_model_as_it_was(at: int, kind: type[BaseException]) -> None:
    forwards = [0]

    class Ending(Counting):
        def forward(self, x: Tensor) -> Tensor:
            left = super().forward(x)
            self.held["left"] = left
            forwards[0] += 1
            if forwards[0] >= at:
                raise kind
            return left

    model, (x, y) = nn.Sequential(Ending(), nn.Linear(8, 6), Merging(), nn.Linear(8, 3)).double(), data()
    before = state(model)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - an error of the model comes as ours
        collect(model, [(x, y)], "classification", batch_size=2)
    assert state(model) == before


def test_a_caller_counts_forward_passes_outside_of_the_model() -> None:
    """Only tensors are traces there; counts and lists of a hook's are the caller's."""
    counted, seen = [0], []
    model, (x, y) = chain(InAttribute()), data()
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    model.register_forward_hook(lambda *_: counted.__setitem__(0, counted[0] + 1))
    collect(model, [(x, y)], "classification")
    assert counted[0] == len(seen) > 2


def test_weights_that_nothing_wrote_to_are_summed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    summed: list[Tensor] = []
    one = model_state._bit_sum

    def counted(tensor: Tensor) -> Tensor:
        summed.append(tensor)
        return one(tensor)

    outside = fingerprint(model)
    with preserve_state(model, torch.float32):
        monkeypatch.setattr(model_state, "_bit_sum", counted)
        assert fingerprint(model) == outside
        assert {id(each) for each in summed} == {id(each) for each in model.buffers()}
        before = model[0].weight.detach().clone()
        with torch.no_grad():
            model[0].weight[0, 0] += 1
        other = fingerprint(model)
        assert other != outside
        assert sum(each is model[0].weight for each in summed) == 1
        with torch.no_grad():
            model[0].weight.copy_(before)
        assert fingerprint(model) == outside


def test_weights_in_another_precision_have_the_checksums_of_that_one() -> None:
    model = nn.Linear(5, 4)
    with preserve_state(model, torch.float64):
        inside = fingerprint(model)
    assert inside != fingerprint(model)
    assert inside == fingerprint(model.double())
