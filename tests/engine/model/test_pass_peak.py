"""The peak of a pass there and back, as the plan foresees it from two or three examples, against the profiler's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.collect import collect_or_read
from engine.estimate import plan_job
from engine.memory.plan import Plan
from engine.model.activation_memory import Saved
from engine.model.pass_peak import StorageEvents, parts_at_peak, peak_lines
from engine.workspace import Workspace
from tests.memory_profile import peak_bytes
from tests.oracles import workspace

LEAST, MOST = 0.85, 1.2
MIB = 2**20


class Last(nn.Module):
    """A recurrent layer, or a cell step by step, that is read at its end."""

    def __init__(self, recurrent: nn.Module, width: int) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.recurrent, nn.RNNBase):
            return self.head(self.recurrent(x)[0][:, -1])
        state: Any = None
        for step in x.unbind(1):
            state = self.recurrent(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Last(nn.LSTM(32, 160, batch_first=True), 160),
    "GRU": lambda: Last(nn.GRU(32, 192, batch_first=True), 192),
    "LSTM cell": lambda: Last(nn.LSTMCell(32, 160), 160),
}


def sequences(model: nn.Module) -> Workspace:
    torch.manual_seed(0)
    chunk = torch.randn(256, 20, 32), torch.randint(0, 5, (256,))
    made = workspace(model, [chunk], "classification", fisher="mc", dtype="float32", batch_size=256)
    made.inputs.examples = 256
    return made


def foreseen(plan: Plan | None) -> int:
    """Bytes of the collection, without what the process held before and what libraries may load."""
    assert plan is not None
    terms = tuple(term for term in plan.terms if term.source != "measured" and term.name != "libraries")
    return Plan(terms=terms, chosen=plan.chosen).stage_bytes("host", "collection")


def require_foreseen(make: Callable[[], Workspace], least: float = LEAST, most: float = MOST) -> None:
    collect_or_read(make())  # what libraries keep from their first call on counts for the process, not for the job
    made = make()
    peak = peak_bytes(lambda: collect_or_read(made))
    assert peak > 20 * MIB
    assert least <= foreseen(made.results.plan) / peak <= most


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.part(of=2, law="what a pass holds is planned")
def test_what_the_steps_of_recurrent_layers_hold_is_planned(name: str) -> None:
    require_foreseen(lambda: sequences(RECURRENT[name]()))


class Squashed(nn.Module):
    """A linear map by the tanh of its weight, whose gradient is made by example."""

    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(leaving, entering) / entering**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.tanh())


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("check", ["off", "growing"])
@pytest.mark.parametrize("width", [512])
@pytest.mark.part(of=2, law="what a pass holds is planned")
def test_gradients_that_are_made_by_example_are_planned(width: int, check: str) -> None:
    def make() -> Workspace:
        torch.manual_seed(0)
        model = nn.Sequential(Squashed(width, 2 * width), nn.GELU(), Squashed(2 * width, width), nn.Linear(width, 10))
        chunk = torch.randn(64, width), torch.randint(0, 10, (64,))
        own = workspace(model, [chunk], "classification", fisher="mc", dtype="float32", batch_size=64, self_check=check)
        own.inputs.examples = 64
        return own

    # how many gradients are made together is planned as if all weights were used together
    require_foreseen(make, 0.8, 1.45)


class Planned(Exception):
    """Ends a collection once its plan stands."""


@pytest.mark.part(of=2, law="what a pass holds is planned")
def test_shapes_alone_foresee_the_same_steps() -> None:
    made = sequences(RECURRENT["LSTM"]())
    alone = plan_job(sequences(RECURRENT["LSTM"]()))

    def stop(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "collection":
            raise Planned

    made.ports.report = stop
    with pytest.raises(Planned):
        collect_or_read(made)
    assert foreseen(alone) == pytest.approx(foreseen(made.results.plan), rel=0.02)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("options", [{"fisher": "mc", "samples": 3}, {"fisher": "type2"}])
@pytest.mark.part(of=2, law="what a pass holds is planned")
def test_a_graph_that_other_directions_need_is_planned_whole(options: dict[str, Any]) -> None:
    def make() -> Workspace:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 16), nn.GELU(), nn.Linear(16, 3))
        chunk = torch.randn(2048, 16), torch.randint(0, 3, (2048,))
        made = workspace(model, [chunk], "classification", dtype="float32", batch_size=2048, **options)
        made.inputs.examples = 2048
        return made

    require_foreseen(make)


def test_the_highest_line_at_any_number_of_examples() -> None:
    # bytes after each event with 2 and with 3 examples: 100, 10 + 5 n, 20 n, and 12 n
    lines = peak_lines((2, 3), ([100, 20, 40, 24], [100, 25, 60, 36]))
    saved = Saved(fixed_bytes=0, example_bytes=0, others=lines)
    for examples in (1, 4, 5, 6, 100):
        assert saved.of(examples) == max(100, 10 + 5 * examples, 20 * examples)
    # where their events differ, the maxima alone can be compared
    assert peak_lines((2, 3), ([10, 40], [60])) == ((0, 20),)
    assert peak_lines((1,), ([10, 40],)) == ((0, 40),)


def test_storages_are_followed_until_they_are_let_go_of() -> None:
    events = StorageEvents()
    whole = torch.zeros(8)
    with events.noted():
        made = whole + 1
        view = made[:4]
        del made
        other = view.double()
        del view
        del other
    assert events.held == [32, 64, 32, 0]


def test_the_peak_is_divided_among_labels() -> None:
    events = StorageEvents("first")
    with events.noted():
        one = torch.zeros(8)
        events.label = "second"
        other = torch.zeros(4)
        copy = one.clone()
        events.relabel(copy, "third")
        del other
        view = one[:2]
        events.relabel(view, "fourth")
        del one, view, copy
    assert max(events.held) == 80
    assert events.held[-1] == 0
    assert parts_at_peak(events.changes, events.labels) == {"first": 32, "second": 16, "third": 32}
    assert parts_at_peak([], []) == {}


def test_only_storages_made_inside_are_labelled_anew() -> None:
    events = StorageEvents()
    outside = torch.zeros(8)
    with events.noted():
        events.relabel(outside, "label")
    assert events.changes == events.labels == []
