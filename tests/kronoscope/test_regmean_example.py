"""The example of RegMean: two least-squares fits give the joint fit, and digits are told apart better than by the mean.

References:
    Jin et al. (2023), Dataless knowledge fusion by merging weights of language models
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/regmean.py"


def fit(inputs: Tensor, targets: Tensor) -> nn.Module:
    """The least-squares fit with a bias, in float64."""
    found = torch.linalg.lstsq(torch.cat([inputs, torch.ones(len(inputs), 1)], 1), targets).solution.mT
    layer = nn.Linear(inputs.shape[1], targets.shape[1])
    with torch.no_grad():
        layer.weight.copy_(found[:, :-1])
        layer.bias.copy_(found[:, -1])
    return nn.Sequential(layer)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_two_least_squares_fits_give_the_joint_fit() -> None:
    spec = importlib.util.spec_from_file_location("regmean", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(3)
    parts = [(torch.randn(count, 6) @ torch.randn(6, 6), torch.randn(count, 3)) for count in (40, 90)]
    models = [fit(*part) for part in parts]
    classes = [(inputs, torch.zeros(len(inputs), dtype=torch.long)) for inputs, _ in parts]
    found = example.merged(list(zip(models, classes, strict=True)))
    joint = fit(*(torch.cat(each) for each in zip(*parts, strict=True))).state_dict()
    for name, each in joint.items():
        assert float((found.state_dict()[name] - each).abs().max()) <= 1e-12
        assert float((example.averaged(models).state_dict()[name] - each).abs().max()) > 1e-2


@pytest.mark.nightly(
    covered_by="tests/kronoscope/test_regmean_example.py::test_two_least_squares_fits_give_the_joint_fit"
)
def test_the_merged_network_knows_all_digits() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True, env=environment)
    rates = [float(line.split("%")[0].split()[-1]) for line in done.stdout.splitlines()]
    *own, mean, regmean = rates
    assert len(own) == 2
    assert max(own) < mean < regmean
    assert regmean > 94
