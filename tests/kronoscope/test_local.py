from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from catalog.requests.collection import Collection
from engine.errors import BrokenFactors, EngineError, UsageError
from engine.factors.dense import digest
from kronoscope.local import Measurement, load_factors, measure


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.fixture
def batches() -> list[tuple[Any, ...]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 5), torch.arange(8) % 3) for _ in range(3)]


EXACT = Collection(fisher="type2", dtype="float64")


def test_a_model_is_measured_in_this_process_and_left_as_it_was(model: nn.Module, batches: list[Any]) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model[0].weight.grad = torch.ones(4, 5)
    model.train()
    found = measure(model, batches, task="classification", kinds=("factors", "capacity"), collection=EXACT)
    assert set(found.of("capacity")) == {"0", "2"}
    assert found.summary["capacity"].coverage.covered_share == 1
    rows = torch.cat([torch.cat([inputs for inputs, _ in batches]), torch.ones(24, 1)], 1).double()
    torch.testing.assert_close(found.factors["0"].A, rows.T @ rows / 24)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 5))
    assert model.training
    assert found.plan["host_peak_bytes"] > 0


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"task": "classify"}, ValueError, "take one of classification"),
        ({"kinds": ["hessian"]}, ValueError, "give one, or a list, of factors, capacity"),
        ({"kinds": "capcity"}, ValueError, "'capcity'; give one, or a list, of factors, .*; did you mean `capacity`"),
        ({"kinds": 3}, ValueError, "give one, or a list, of factors, capacity"),
        ({"model": 3}, TypeError, "`model` is int"),
    ],
)
def test_what_is_no_input_is_said(model: nn.Module, batches: list[Any], changes: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        measure(**{"model": model, "batches": batches, "task": "classification", **changes})


def test_threads_that_measure_one_model_take_turns(model: nn.Module, batches: list[Any]) -> None:
    """Torch's switches and the model's flags belong to the process: crosswise, one would restore the other's."""
    switches = (torch.backends.mha.get_fastpath_enabled, torch.get_float32_matmul_precision, torch.get_rng_state)

    def state() -> list[Any]:
        flags = [(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()]
        return [[read() for read in switches[:2]], switches[2]().tolist(), flags, model.training]

    def measured(_: int = 0) -> list[str]:
        found = measure(model, batches, task="classification", kinds="factors", collection={"fisher": "mc"})
        return [digest(side) for name in found.factors for side in (found.factors[name].A, found.factors[name].G)]

    alone, before = measured(), state()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(measured, range(4))) == [alone] * 4
    assert state() == before


def test_the_callers_autocast_narrows_nothing(model: nn.Module, batches: list[Any]) -> None:
    alone = measure(model, batches, task="classification")
    with torch.autocast("cpu", torch.bfloat16):
        inside = measure(model, batches, task="classification")
        assert torch.is_autocast_enabled("cpu")
    assert [row.metrics for row in inside.layers] == [row.metrics for row in alone.layers]
    for name in alone.factors:
        assert torch.equal(inside.factors[name].A, alone.factors[name].A)
        assert torch.equal(inside.factors[name].G, alone.factors[name].G)


defaults_seen: set[str] = set()
"""Torch's default devices in the passes of ``Noting``; what a model holds itself is put back after each."""


class Noting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        defaults_seen.add(torch.get_default_device().type)
        return x


def test_the_callers_default_device_is_the_models_alone(model: nn.Module, batches: list[Any]) -> None:
    """Nothing can be computed on the meta device: what followed the default there would be refused."""
    wrapped, kinds = nn.Sequential(model, Noting()), ("factors", "capacity", "reconstruction")
    defaults_seen.clear()
    alone = measure(wrapped, batches, task="classification", kinds=kinds)
    assert defaults_seen == {"cpu"}
    defaults_seen.clear()
    with torch.device("meta"):
        inside = measure(wrapped, iter(batches), task="classification", kinds=kinds)
        rows = measure(wrapped, batches, task="classification", woodbury={"policy": "all"}).factors["0.0"].gradient_rows
        assert torch.get_default_device().type == "meta"
    assert rows is not None
    assert rows.device.type == "cpu"
    assert defaults_seen == {"meta"}
    assert [row.metrics for row in inside.layers] == [row.metrics for row in alone.layers]
    for name in alone.factors:
        assert torch.equal(inside.factors[name].A, alone.factors[name].A)
        assert torch.equal(inside.factors[name].G, alone.factors[name].G)


def test_an_iterator_and_a_callable_give_what_a_list_gives(model: nn.Module, batches: list[Any]) -> None:
    results = [
        measure(model, given, task="classification", collection=EXACT).of("capacity")["2"].metrics
        for given in (batches, iter(batches), lambda: iter(batches))
    ]
    assert results[0] == results[1] == results[2]


def test_a_diagonal_A_is_dense_on_demand() -> None:  # noqa: N802 - the field's own symbol
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 3))
    batches = [(torch.tensor([[0, 1], [1, 2], [5, 5]]), torch.tensor([0, 1, 2]))]
    factors = measure(model, batches, task="classification", kinds=("factors",), collection=EXACT).factors
    counts = torch.tensor([1, 2, 1, 0, 0, 2], dtype=torch.float64)
    torch.testing.assert_close(factors["0"].A, torch.diag(counts / 6))
    torch.testing.assert_close(factors["0"].diagonal_A, counts / 6)


def test_a_folder_without_factors_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(BrokenFactors, match=r"no factors\.index\.json.*keep: \[factors\]"):
        load_factors(tmp_path)


def keep(folder: Path, found: Measurement) -> None:
    """Write a measurement's dense factors as a job keeps them."""
    from worker.execution.files.artifact_files import ArtifactFiles  # noqa: PLC0415 - the test writes as the worker does

    held = found.factors.collected
    files = ArtifactFiles(folder, lambda *_: None)
    for facts in held.layers:
        factors = held.load(facts.ordinal)
        upper = torch.triu_indices(facts.in_dim, facts.in_dim), torch.triu_indices(facts.out_dim, facts.out_dim)
        tensors = {
            "activation_covariance": factors.A[upper[0][0], upper[0][1]],
            "gradient_covariance": factors.G[upper[1][0], upper[1][1]],
        }
        files.save_tensors(f"factors/{facts.ordinal}.safetensors", tensors, {})
    files.save_json("factors/factors.index.json", found.index)


def test_a_measurement_is_compared_with_factors_in_a_folder(
    tmp_path: Path, model: nn.Module, batches: list[Any]
) -> None:
    options: dict[str, Any] = {"task": "classification", "collection": EXACT}
    keep(tmp_path, measure(model, batches, kinds=("factors",), **options))

    def compared(**asked: Any) -> Measurement:
        return measure(
            model, batches, kinds=("compare_curvature",), params={"compare_curvature": {"k": (1, 2)} | asked}, **options
        )

    same = compared(against={"path": str(tmp_path)}).summary["compare_curvature"]
    assert (same.distance, same.divergence, same.layers) == (0, 0, 2)
    with torch.no_grad():
        model[2].weight.mul_(2)
    moved = compared(against={"path": str(tmp_path / "factors")})
    assert moved.summary["compare_curvature"].distance > 0
    # the first layer's input is the data, which did not move
    assert moved.of("compare_curvature")["0"].metrics.A.distance == 0
    with pytest.raises(UsageError, match=r"give `compare_curvature\.against`"):
        compared()
    with pytest.raises(ValueError, match="in a notebook give"):
        compared(against={"job": "0190"})
    with pytest.raises(BrokenFactors, match=r"no factors\.index\.json"):
        compared(against={"path": str(tmp_path / "nothing")})


def test_a_flipped_bit_is_found_when_it_is_read(tmp_path: Path, model: nn.Module, batches: list[Any]) -> None:
    found = measure(model, batches, task="classification", kinds=("factors",), collection=EXACT)
    keep(tmp_path, found)
    assert torch.equal(load_factors(tmp_path, verify=True)["2"].G, found.factors["2"].G)
    path = tmp_path / "factors" / "1.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["gradient_covariance"][0] += 1e-9
    safetensors.torch.save_file(tensors, path)
    opened = load_factors(tmp_path)
    for read in (lambda: opened["2"].G, lambda: load_factors(tmp_path, verify=True)):
        with pytest.raises(BrokenFactors, match=r"layer `2`: `gradient_covariance` of `factors/1\.safetensors`"):
            read()


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, *, named: bool = False) -> None:
        self.inputs, self.targets, self.named = inputs, targets, named

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> Any:
        x, y = self.inputs[place], int(self.targets[place])
        return {"input": x, "label": y} if self.named else (x.numpy(), y)


def test_data_are_taken_as_people_hold_them(model: nn.Module, batches: list[Any]) -> None:
    inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=5)
    forms = [
        batches,
        (inputs, targets),
        Pairs(inputs, targets),
        Pairs(inputs, targets, named=True),
        loader,
        [{"inputs": inputs, "labels": targets}],
        lambda: Pairs(inputs, targets),
    ]
    digests = set()
    for form in forms:
        found = measure(model, form, task="classification", collection=EXACT)
        digests.add(found.index["layers"][0]["gradient_covariance"]["sha256"])
    assert len(digests) == 1


def test_a_loader_that_shuffles_is_read_once(model: nn.Module, batches: list[Any]) -> None:
    inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
    loader = torch.utils.data.DataLoader(Pairs(inputs, targets), batch_size=4, shuffle=True)
    found = measure(model, loader, task="classification", collection={"ekfac": True, "dtype": "float64"})
    trace = found.of("capacity")["2"].record.exact_trace
    assert trace is not None
    # the corrections are collected in a second pass, the trace in the first: they agree only for the same labels
    assert float(found.factors["2"].corrected_eigenvalues.sum()) == pytest.approx(trace, rel=1e-10)


def test_options_are_taken_as_mappings(model: nn.Module, batches: list[Any]) -> None:
    found = measure(
        model,
        batches,
        task={"type": "classification", "label_smoothing": 0.1},
        collection={"fisher": "type2"},
        stabilisation={"damping": 1e-3},
        memory={},
        params={"capacity": {"top_k": 3}},
    )
    metrics = found.of("capacity")["2"].metrics
    assert len(metrics.top_eigenvalues) == 3
    assert found.summary["capacity"].fisher == "type2"
    assert repr(found) == "<Measurement: capacity of 2 layers; 100.0% full block>"


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"collection": {"batchsize": 4}}, ValueError, "no field `batchsize`; did you mean `batch_size`"),
        ({"stabilisation": {"kappa_max": 0.5}}, ValueError, "`stabilisation.kappa_max`"),
        ({"woodbury": 3}, TypeError, "`woodbury` is int; give Woodbury or a mapping"),
        ({"params": {"capacity": {"topk": 1}}}, ValueError, r"`params\['capacity'\]` has no field `topk`"),
        ({"batches": [{"x": torch.ones(2, 5)}]}, EngineError, "one entry must be called labels or label"),
        ({"batches": Pairs(torch.ones(2, 5), torch.ones(2)).inputs}, EngineError, "must yield"),
    ],
)
def test_options_and_data_that_cannot_be_are_refused(
    model: nn.Module, batches: list[Any], changes: Any, error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        measure(**{"model": model, "batches": batches, "task": "classification", **changes})
