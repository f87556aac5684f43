"""The architecture table can tell right from wrong, names what it lacks, and its page is that of its result."""

import json
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import results_file
from benchmarks.architecture_cases import adapters, checkpoints, graphs, language, networks, traps
from benchmarks.architecture_cases.case import Builder
from benchmarks.architecture_cases.judgement import TOLERANCE, judged
from benchmarks.architectures import COMPLETE, PAGE, RESULTS, is_right, page, reasons
from engine.layers.linear import LinearLayer

RIGHT = {
    "GPT-2": language.CASES["GPT-2"],
    "BERT masked LM, padded": language.CASES["BERT masked LM, padded"],
    "Learned query": networks.CASES["Learned query"],
    "Circular convolution": networks.CASES["Circular convolution"],
    "Batch norm": traps.CASES["Batch norm"],
}


@pytest.mark.parametrize("build", RIGHT.values(), ids=RIGHT)
def test_what_is_known_is_right(build: Builder) -> None:
    row = judged(build)
    assert row["verdict"] == "right", row
    assert row["covered"] == 1
    assert row["worst"]["error"] < TOLERANCE
    assert row["compared"] > 0


@pytest.mark.parametrize("method", ["activation_rows", "gradient_rows"])
def test_a_fault_of_a_thousandth_is_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = getattr(LinearLayer, method)
    monkeypatch.setattr(LinearLayer, method, lambda layer, tensor: own(layer, tensor) * 1.001)
    # the engine's own check would find it first
    row = judged(networks.CASES["Learned query"], self_check="off")
    assert row["verdict"] == "wrong"
    assert 1e-4 < row["worst"]["error"] < 1e-2


def test_a_model_that_draws_is_not_compared() -> None:
    assert judged(traps.CASES["MC dropout"])["verdict"] in ("random", "refused")


@pytest.mark.parametrize(
    ("package", "build"), [("peft", adapters.CASES["LoRA"]), ("torch_geometric", graphs.CASES["GCN"])]
)
def test_a_missing_package_is_said_to_be(package: str, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package] + [package, f"{package}.nn"]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    row = judged(build)
    assert row["verdict"] == "not installed"
    assert package in row["message"]


def test_a_model_that_cannot_run_is_no_case() -> None:
    def build() -> Any:
        raise ValueError("no such configuration")

    assert judged(build) == {"verdict": "no case", "message": "ValueError: no such configuration"}


def test_the_page_is_that_of_the_stored_result() -> None:
    result, read = (json.loads((results_file.RESULTS / f"{name}.json").read_text()) for name in RESULTS)
    assert PAGE.read_text() == page(result, read), "run: .venv/bin/python -P -m benchmarks.architectures --page"
    names = [name for cases in result["figures"]["table"].values() for name in cases]
    assert len(names) >= 60
    table = read["figures"]["table"]
    assert len(table) >= 80
    assert sum(map(is_right, table.values())) >= 70
    assert all(is_right(row) or reasons(row) for row in table.values())


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("model_type", checkpoints.QUICK)
def test_a_checkpoint_is_right_through_the_service(model_type: str) -> None:
    row = checkpoints.judged(model_type, checkpoints.CASES[model_type])
    assert row["verdict"] == "right", row
    assert row["covered"] >= COMPLETE
    assert row["compared"] > 10


def test_the_noise_leaves_no_parameter_without_gradient() -> None:
    model = networks.enlivened(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)))
    x: Tensor = networks.normal(5, 3)
    gradients = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(bool(gradient.any()) for gradient in gradients)
