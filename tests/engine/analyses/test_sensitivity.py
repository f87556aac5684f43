"""Sensitivity: exact where the loss is quadratic, the dense twin elsewhere, and a choice that is the best there is."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.sensitivity import SensitivityParams
from engine.analyses.metrics import weight_formats
from engine.analyses.metrics.weight_formats import choose_formats, format_bytes, in_format
from engine.errors import UsageError
from kronoscope.local import Measurement, OptionRefused, measure


def ignore() -> None:
    """Nothing is cancelled."""


FORMATS = ("int8", "int4", "int4_group", "fp8", "2:4", "low_rank")
OPTIONS: dict[str, Any] = {"formats": FORMATS, "group": 4, "rank": 2}
FLOAT64 = {"dtype": "float64", "fisher": "type2", "self_check": "off"}


def predicted(net: nn.Module, data: Any, task: str, **options: Any) -> Measurement:
    params = {"sensitivity": {**OPTIONS, **options}}
    return measure(net, data, task=task, kinds="sensitivity", collection=FLOAT64, params=params)  # type: ignore[arg-type]


def test_of_a_linear_regression_it_is_the_change_itself() -> None:
    torch.manual_seed(0)
    net = nn.Linear(9, 4).double()
    inputs, targets = torch.randn(50, 9).double(), torch.randn(50, 4).double()
    rows = predicted(net, [(inputs, targets)], "regression").of("sensitivity")
    before = float(nn.functional.mse_loss(net(inputs), targets).detach())
    kept = net.weight.detach().clone()
    for change in rows["(model)"].metrics.changes:
        with torch.no_grad():
            net.weight.copy_(in_format(kept, change.format, SensitivityParams(**OPTIONS)))
        after = float(nn.functional.mse_loss(net(inputs), targets).detach())
        assert change.predicted == pytest.approx(after - before, rel=1e-10, abs=1e-13)
        assert change.relative_error == pytest.approx(
            float((net.weight.detach() - kept).norm() / kept.norm()), rel=1e-12
        )


def test_of_a_net_it_is_the_product_of_its_factors_made_dense() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Tanh(), nn.Linear(32, 3, bias=False)).double()
    images, labels = torch.randn(12, 1, 6, 6).double(), torch.randint(3, (12,))
    made = predicted(net, [(images, labels)], "classification")
    nn.functional.cross_entropy(net(images), labels).backward()
    for name, row in made.of("sensitivity").items():
        module = net[int(name)]
        assert isinstance(module, (nn.Conv2d, nn.Linear))
        factors = made.factors[name]
        weights = module.weight.detach().flatten(1)
        A = factors.A[:-1, :-1] if module.bias is not None else factors.A
        gradient = module.weight.grad
        assert gradient is not None
        for change in row.metrics.changes:
            delta = in_format(weights, change.format, SensitivityParams(**OPTIONS)) - weights
            block = torch.kron(factors.G, A)
            assert change.quadratic == pytest.approx(float(0.5 * delta.flatten() @ block @ delta.flatten()), rel=1e-10)
            assert change.linear == pytest.approx(float((gradient.flatten(1) * delta).sum()), rel=1e-9, abs=1e-15)


def test_a_task_without_labels_has_no_gradient() -> None:
    torch.manual_seed(2)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs)  # type: ignore[no-any-return]

    net = Encoder().double()
    inputs = torch.randn(20, 3, 5).double()
    made = predicted(net, [(inputs, torch.zeros(20, 4))], "embedding")
    kept = net.inner.weight.detach().clone()
    before = net(inputs).mean(1)
    for change in made.of("sensitivity")["inner"].metrics.changes:
        assert change.linear == 0
        with torch.no_grad():
            net.inner.weight.copy_(in_format(kept, change.format, SensitivityParams(**OPTIONS)))
        # K-FAC's A is that of positions, and the mean over them is shorter: the order is what is asked for
        assert change.predicted > 0
        assert float((net(inputs).mean(1) - before).detach().square().mean()) > 0


def test_what_is_no_matrix_keeps_its_bits() -> None:
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))
    made = predicted(net, [(torch.randn(8, 6), torch.randint(3, (8,)))], "classification")
    rows = made.of("sensitivity")
    assert (rows["0"].metrics.changes, rows["0"].metrics.kept_since) == ((), "its parameters are no matrix")
    summary = made.summary["sensitivity"]
    assert [each.layers for each in summary.formats] == [1] * len(FORMATS)
    assert (summary.bytes_16, summary.chosen) == (2 * (12 + 21), None)


def test_within_a_budget_each_layer_has_its_format() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))
    data = [(torch.randn(40, 16), torch.randint(4, (40,)))]
    made = predicted(net, data, "classification", budget=0.6)
    summary, rows = made.summary["sensitivity"], made.of("sensitivity")
    options = [
        [
            ("16 bits", row.metrics.bytes_16, 0.0),
            *((each.format, each.total_bytes, each.predicted) for each in row.metrics.changes),
        ]
        for row in rows.values()
    ]
    fitting = [
        chosen for chosen in itertools.product(*options) if sum(each[1] for each in chosen) <= summary.budget_bytes
    ]
    best = min(fitting, key=lambda chosen: sum(each[2] for each in chosen))
    assert [each.format for each in summary.chosen] == [each[0] for each in best]
    assert summary.chosen_bytes == sum(each[1] for each in best) <= summary.budget_bytes == int(0.6 * summary.bytes_16)
    assert summary.chosen_predicted == pytest.approx(sum(each[2] for each in best))
    assert summary.slack_bytes == 0


def test_a_budget_that_nothing_meets_names_the_least() -> None:
    net = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
    data = [(torch.randn(9, 16), torch.randint(4, (9,)))]
    with pytest.raises(UsageError, match=r"`sensitivity.budget` is 0.1, .* take (0\.\d+) or more") as caught:
        predicted(net, data, "classification", budget=0.1)
    least = float(str(caught.value).partition("take ")[2].split(";")[-1].split("take ")[-1].split(" or")[0])
    predicted(net, data, "classification", budget=least)
    with pytest.raises(UsageError, match=r"or name smaller formats"):
        predicted(net, data, "classification", budget=least - 0.002)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"formats": ()}, "is empty"),
        ({"formats": ("int8", "int8")}, "names a format twice"),
        ({"formats": ("int3",)}, "formats"),
        ({"group": 1}, "is 1; take 2 or more"),
        ({"rank": 0}, "is 0; take 1 or more"),
        ({"budget": 0.0}, "is 0.0; take a share"),
        ({"budget": float("nan")}, "budget"),
        ({"budget": 1.5}, "is 1.5; take a share"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionRefused, match=said):
        predicted(nn.Linear(3, 2), [(torch.randn(4, 3), torch.randint(2, (4,)))], "classification", **options)


@pytest.mark.part(of=120, by=())
@pytest.mark.parametrize("seed", range(200))
def test_the_choice_is_that_of_trying_all(seed: int) -> None:
    draw = random.Random(seed)
    options = [[(draw.randint(1, 40), draw.choice([0.0, draw.uniform(-0.2, 1)])) for _ in range(3)] for _ in range(10)]
    least = sum(min(size for size, _ in each) for each in options)
    budget = draw.randint(least, least + 150)
    best = min(
        sum(change for _, change in chosen)
        for chosen in itertools.product(*options)
        if sum(size for size, _ in chosen) <= budget
    )
    found = choose_formats(options, budget, ignore)
    assert found is not None
    picked = [each[place] for each, place in zip(options, found.chosen, strict=True)]
    assert found.total_bytes == sum(size for size, _ in picked) <= budget
    assert found.total == pytest.approx(sum(change for _, change in picked), abs=1e-12)
    assert found.total == pytest.approx(best, abs=1e-12)
    assert found.slack_bytes == 0
    assert choose_formats(options, least - 1, ignore) is None


def test_with_too_many_states_the_choice_says_how_near_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_formats, "MOST_STATES", 64)
    draw = random.Random(0)
    options = [[(draw.randint(1, 10**6), draw.uniform(0, 1)) for _ in range(4)] for _ in range(40)]
    budget = sum(sorted(size for size, _ in each)[1] for each in options)
    near = choose_formats(options, budget, ignore)
    assert near is not None
    assert near.total_bytes <= budget
    assert near.slack_bytes > 0
    monkeypatch.setattr(weight_formats, "MOST_STATES", 2**16)
    best, less = choose_formats(options, budget, ignore), choose_formats(options, budget - near.slack_bytes, ignore)
    assert best is not None
    assert best.slack_bytes == 0
    assert best.total <= near.total
    assert less is None or near.total <= less.total + 1e-12


def test_formats_hold_what_their_definitions_say() -> None:
    torch.manual_seed(4)
    weights = torch.randn(5, 10).double()
    weights[2] = 0
    params = SensitivityParams(**OPTIONS)
    for name, largest in (("int8", 127), ("int4", 7)):
        found = in_format(weights, name, params)  # type: ignore[arg-type]
        for row, other in zip(weights, found, strict=True):
            scale = float(row.abs().max()) / largest or 1.0
            assert torch.allclose(other, torch.tensor([round(float(each) / scale) * scale for each in row]).double())
    grouped = in_format(weights, "int4_group", params)
    for begin in (0, 4, 8):
        part = slice(begin, begin + 4)
        assert torch.equal(grouped[:, part], in_format(weights[:, part], "int4", params))
    sparse = in_format(weights, "2:4", params)
    assert torch.equal(sparse[:, 8:], weights[:, 8:])
    for row, other in zip(weights[:, :8].reshape(-1, 4), sparse[:, :8].reshape(-1, 4), strict=True):
        kept = sorted(sorted(range(4), key=lambda place: -abs(float(row[place])))[:2])
        assert [float(each) for each in other] == [float(row[place]) if place in kept else 0.0 for place in range(4)]
    assert torch.linalg.matrix_rank(in_format(weights, "low_rank", params)) == 2
    best = torch.linalg.svdvals(weights)[2:].square().sum().sqrt()
    assert float((in_format(weights, "low_rank", params) - weights).norm()) == pytest.approx(float(best))
    narrow = in_format(weights, "fp8", params)
    assert float((narrow - weights).abs().max() / weights.abs().max()) < 2**-4
    assert torch.equal(in_format(narrow, "fp8", params), narrow)
    assert float(narrow[2].abs().max()) == 0


def test_bytes_are_those_of_what_is_stored() -> None:
    params = SensitivityParams(**OPTIONS)
    expected = {
        "int8": 50 + 10,
        "int4": 25 + 10,
        "int4_group": 25 + 5 * 3 * 2,
        "fp8": 50 + 10,
        "2:4": 2 * 5 * (4 + 2) + 5,  # four of eight columns and the two others, and two bits for each of twenty places
        "low_rank": 2 * 2 * 15,
    }
    assert {name: format_bytes(5, 10, name, params) for name in FORMATS} == expected  # type: ignore[arg-type]


def test_two_runs_give_the_same_rows_and_say_how_far_they_are() -> None:
    def rows() -> Any:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        data = torch.utils.data.TensorDataset(torch.randn(30, 8), torch.randint(3, (30,)))
        params = {"sensitivity": {**OPTIONS, "budget": 0.7}}
        collection = {**FLOAT64, "batch_size": 8}
        seen: list[Any] = []
        made = measure(
            net, data, task="classification", kinds="sensitivity", collection=collection, params=params,
            report=lambda *each: seen.append(each),
        )  # fmt: skip
        return [row.metrics for row in made.layers], made.summary["sensitivity"], seen

    first = rows()
    assert rows() == first
    gradient = [each[1:] for each in first[2] if each[0] == "sensitivity" and each[3] == "batches"]
    assert gradient == [(done, 4, "batches") for done in (1, 2, 3, 4)]


@pytest.mark.parametrize("layers", [1, 3000])
def test_the_states_of_many_layers_keep_within_their_bytes(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    monkeypatch.setattr(weight_formats, "STATES_BYTES", 2**20)
    draw = random.Random(1)
    options = [[(draw.randint(1, 10**6), draw.uniform(0, 1)) for _ in range(3)] for _ in range(layers)]
    budget = sum(sorted(size for size, _ in each)[1] for each in options)
    found = choose_formats(options, budget, ignore)
    assert found is not None
    assert found.total_bytes <= budget
    assert len(found.chosen) == layers


def test_a_layer_of_which_the_bias_alone_is_trained_keeps_its_bits() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    net[0].weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    made = predicted(net, [(torch.randn(8, 4), torch.randint(2, (8,)))], "classification", budget=1.0)
    assert made.of("sensitivity")["0"].metrics.kept_since == "its bias alone is trained"
    assert made.of("sensitivity")["2"].metrics.kept_since is None
    alone = nn.Sequential(nn.LayerNorm(4), nn.Flatten())
    rows = predicted(alone, [(torch.randn(8, 4), torch.randint(4, (8,)))], "classification").of("sensitivity")
    assert rows["0"].metrics.changes == ()


def test_a_table_is_rounded_vector_by_vector() -> None:
    torch.manual_seed(6)
    net = nn.Sequential(nn.Embedding(7, 8), nn.Flatten(), nn.Linear(16, 3)).double()
    ids, labels = torch.randint(7, (30, 2)), torch.randint(3, (30,))
    made = predicted(net, [(ids, labels)], "classification")
    table = net[0].weight.detach()  # type: ignore[operator, union-attr]
    for change in made.of("sensitivity")["0"].metrics.changes:
        own = in_format(table, change.format, SensitivityParams(**OPTIONS)) - table  # type: ignore[arg-type]
        assert change.relative_error == pytest.approx(float(own.norm() / table.norm()), rel=1e-12)
        assert change.total_bytes == format_bytes(7, 8, change.format, SensitivityParams(**OPTIONS))


def test_without_a_g_there_is_no_change_of_the_loss() -> None:
    data = [(torch.randn(4, 3), torch.randint(2, (4,)))]
    with pytest.raises(UsageError, match="which has no G, and so no change of the loss"):
        measure(
            nn.Linear(3, 2), data, task="classification", kinds="sensitivity", collection={"fisher": "forward_only"}
        )


def test_a_share_is_taken_as_it_is_written() -> None:
    net = nn.Linear(24, 2, bias=False)  # 96 bytes in 16 bits
    made = predicted(net, [(torch.randn(9, 24), torch.randint(2, (9,)))], "classification", budget=0.58)
    assert made.summary["sensitivity"].budget_bytes == 55
    net = nn.Linear(25, 2, bias=False)  # 100 bytes, of which 0.58 is 58 and 57.99… in floating point
    made = predicted(net, [(torch.randn(9, 25), torch.randint(2, (9,)))], "classification", budget=0.58)
    assert made.summary["sensitivity"].budget_bytes == 58
