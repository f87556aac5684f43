"""Sums on the host: the same statistics, by way of two small staging buffers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.requests.memory import Memory
from engine.collect import collect_or_read
from engine.estimate import plan_job
from engine.linalg.gram import add_gram_, add_grams_
from engine.memory import device_speed, host_accumulation
from engine.memory.budget import MemoryBudget
from engine.memory.device_speed import MEASURING_DEVICE_BYTES, measure_speed
from engine.memory.host_accumulation import Staging, pinned_bytes, staging_numbers
from engine.memory.plan import Chosen
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, relative_error, workspace

CPU = torch.device("cpu")


@pytest.mark.parametrize("numbers", [7, 20, 49, 10_000])
def test_panels_of_any_size_make_the_same_triangle(numbers: int) -> None:
    rows = torch.randn(30, 7, dtype=torch.float64)
    total, truth = torch.ones(7, 7, dtype=torch.float64), torch.ones(7, 7, dtype=torch.float64) + rows.T @ rows
    staging = Staging(numbers, torch.float64, CPU)
    add_gram_(total, rows, staging)
    staging.settle()
    assert relative_error(total.triu(), truth.triu()) < 1e-14


@pytest.mark.parametrize(("groups", "size"), [(5, 3), (40, 1), (2, 400)])
def test_groups(groups: int, size: int) -> None:
    rows = torch.randn(11, groups * size, dtype=torch.float64)
    truth = torch.einsum("pgi,pgj->gij", *[rows.view(11, groups, size)] * 2)
    staging = Staging(max(size * size // 3, groups), torch.float64, CPU)
    total = add_grams_(torch.zeros(groups, size, size, dtype=torch.float64), rows, staging)
    staging.settle()
    assert relative_error(total.triu(), truth.triu()) < 1e-14


def test_additions_arrive_in_order_and_only_once() -> None:
    staging = Staging(2, torch.float64, CPU)
    total, added = torch.zeros(2, dtype=torch.float64), []
    for number in range(5):
        staging.add_(total, lambda made, number=number: made.fill_(10.0**number))
        added.append(float(total[0]))
    # two are always on their way
    assert added == [0, 0, 1, 11, 111]
    for _ in range(2):
        staging.settle()
        assert total.tolist() == [11111, 11111]


def test_staging_on_a_gpu_is_planned_as_it_is_pinned() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 3, 4, 5, 2**20 + 1)] == [0, 1, 4, 4, 8, 2**21]
    staged = {}
    for device in ("cpu", "cuda"):
        model = nn.Sequential(nn.Linear(1000, 4))
        made = workspace(model, [(torch.zeros(4, 1000), torch.zeros(4, 4))], "regression", batch_size=4)
        made.machine.device, made.options.memory = torch.device(device), Memory(offload="on")
        made.machine.budget = MemoryBudget(device_bytes=2**36, host_bytes=2**40)
        terms = [term for term in plan_job(made).terms if term.name == "staging"]
        staged[device] = [(term.place, term.size_bytes) for term in terms]
    # two panels of 1001² numbers in float64, for which 8 MiB are pinned each
    held = 2 * 8 * 1001**2
    assert staged["cpu"] == [("host", held)] * 2
    assert staged["cuda"] == [("device", held), ("host", 2 * 2**23)]


def test_a_buffer_is_no_larger_than_the_largest_factor_or_a_panel() -> None:
    assert staging_numbers([(1, 10), (1, 3)]) == 100
    assert staging_numbers([(6, 4), (50, 1)]) == 6 * 16
    assert staging_numbers([(1, 2**15)]) == 2**24
    # one row must fit
    assert staging_numbers([(2**25, 1)]) == 2**25
    assert staging_numbers([]) == 1


class Every(nn.Module):
    """A table, grouped and depthwise convolutions, a norm, a head tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.grouped, self.depthwise = nn.Conv1d(8, 8, 3, padding=1, groups=2), nn.Conv1d(8, 8, 1, groups=8)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids)).transpose(1, 2)
        x = torch.tanh(self.depthwise(self.grouped(x))).transpose(1, 2)
        return self.head(torch.tanh(self.q(x)) * self.k(x))


def space(wish: str, **options: Any) -> Workspace:
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (10, 6))
    made = workspace(Every(), [(ids, ids)], "causal_lm", **options)
    made.options.memory = Memory(offload=wish, micro_batch=3)  # type: ignore[arg-type]
    return made


@pytest.mark.part(of=32, by=("fisher",))
@pytest.mark.parametrize("fisher", ["mc", "empirical", "forward_only"])
@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.5}, {"sharing": "reduce"}, {"nested": True}])
def test_sums_on_the_host_are_the_same(fisher: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # small panels, so that there are several
    monkeypatch.setattr(host_accumulation, "_PANEL", 24)
    off, on = space("off", fisher=fisher, **options), space("on", fisher=fisher, **options)
    plans: list[Any] = []
    on.ports.announce_plan = plans.append
    truth, found = collect_or_read(off), collect_or_read(on)
    assert plans[0]["offload"]
    assert [term["name"] for term in plans[0]["terms"]].count("staging") == 2
    assert [layer.name for layer in found.layers] == [layer.name for layer in truth.layers]
    for layer in truth.layers:
        left, right = found.load(layer.ordinal), truth.load(layer.ordinal)
        assert relative_error(left.A, right.A) < 1e-13
        assert relative_error(left.G, right.G) < 1e-13
    for left_size, right_size in zip(found.nested, truth.nested, strict=True):
        assert relative_error(left_size.load(0).A, right_size.load(0).A) < 1e-13


def test_passes_and_their_replay() -> None:
    whole, cut = space("on", fisher="mc"), space("on", fisher="mc")
    names = [layer.name.partition("[")[0] for layer in collect_or_read(whole).layers]
    plans: list[Any] = []
    again = space("on", fisher="mc")
    again.ports.announce_plan = plans.append
    collect_or_read(again)
    cut.resume.chosen = offload_chosen(plans[0], sorted(set(names), key=names.index))
    cut.options.memory, cut.ports.scratch = Memory(offload="off"), MemoryArtifacts()
    found = collect_or_read(cut)
    assert found.passes == 2
    for layer in found.layers:
        left, right = found.load(layer.ordinal), collect_or_read(whole).load(layer.ordinal)
        assert torch.equal(left.A, right.A)
        assert torch.equal(left.G, right.G)


def offload_chosen(plan: dict[str, Any], names: list[str]) -> Any:
    return Chosen.read({**plan, "parts": [names[:2], names[2:]]})


def test_pace_is_measured() -> None:
    pace = measure_speed(CPU)
    assert 1e8 < pace.operations_per_second < 1e15
    assert 1e6 < pace.bytes_per_second < 1e13


def test_the_pace_is_that_of_random_numbers_and_of_large_sides_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decomposed: list[int] = []
    multiplied: list[float] = []
    matmul = torch.matmul

    def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        multiplied.append(float(left.std()))
        return matmul(left, right, out=out)

    monkeypatch.setattr(torch, "matmul", multiply)
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: decomposed.append(matrix.shape[0]))
    state = torch.get_rng_state()
    measure_speed(CPU)
    assert all(spread == pytest.approx(1, abs=0.01) for spread in multiplied)
    assert set(decomposed) == {256}
    assert torch.equal(torch.get_rng_state(), state)
    assert device_speed._EIGEN_ROWS["cuda"] == 1024
    assert MEASURING_DEVICE_BYTES > 6 * 8 * 1024**2 + 4 * device_speed._NEW_NUMBERS
