"""Merged factors: the analyses of a divided job, and of a job over the factors that it kept, are those of one set."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from catalog.frames import Summarised
from tests.worker.execution.pieces.conftest import Run, Runner
from worker.execution.models.builtin import ARCHITECTURES

KINDS = ["spectrum", "natural_gradient", "compare_curvature"]


def metrics(run: Run) -> dict[Any, Any]:
    return {(row["kind"], row["layer"]): row["metrics"] for row in run.rows if row["kind"] in KINDS}


def comparison(run: Run) -> Any:
    (found,) = [
        frame.summary for frame in run.frames if isinstance(frame, Summarised) and frame.kind == "compare_curvature"
    ]
    return found


def test_analyses_of_merged_and_of_stored_merged_factors_agree(runner: Runner, tmp_path: Path) -> None:
    torch.manual_seed(0)
    gradient = {name: torch.randn(each.shape) for name, each in ARCHITECTURES["digits_mlp"]().named_parameters()}
    safetensors.torch.save_file(gradient, tmp_path / "gradient.safetensors")
    collected = {
        "model": {"source": "builtin", "name": "digits_mlp"},
        "data": {"source": "builtin", "name": "digits", "limit": 90},
        "task": {"type": "classification"},
        "collection": {"batch_size": 16, "dtype": "float64", "self_check": "off"},
    }
    whole = runner.job("whole", {**collected, "kind": "factors"})
    asked: dict[str, Any] = {
        "kind": KINDS,
        "compare_curvature": {"against": {"path": str(whole.folder / "artifacts")}, "k": [1]},
        "natural_gradient": {"gradient": {"path": str(tmp_path / "gradient.safetensors")}},
    }
    divided = runner.job("divided", {**collected, **asked, "kind": [*KINDS, "factors"], "shards": 3})
    stored = runner.job("stored", {**asked, "factors": {"path": str(divided.folder / "artifacts")}})
    undivided = runner.job("undivided", {**asked, "factors": {"path": str(whole.folder / "artifacts")}})
    for run in (divided, stored):
        assert comparison(run)["distance"] <= 1e-12
        assert comparison(run)["factors_sha256"] != comparison(run)["against_sha256"]
        assert comparison(run)["layers"] == len(whole.factors.layers)
    assert comparison(undivided)["distance"] == 0
    # what was merged is what was stored, to the last bit
    assert metrics(stored) == metrics(divided)
    found, expected = metrics(divided), metrics(undivided)
    assert found.keys() == expected.keys()
    for key in found:
        if key[0] == "natural_gradient":
            for one, other in zip(found[key]["directions"], expected[key]["directions"], strict=True):
                for name, value in one.items():
                    # a residual is rounding itself
                    near = pytest.approx(other[name], rel=1e-8, abs=1e-9) if isinstance(value, float) else other[name]
                    assert value == near, (key, name)
        if key[0] == "spectrum":
            assert found[key]["kfac"]["largest"][0]["value"] == pytest.approx(
                expected[key]["kfac"]["largest"][0]["value"], rel=1e-12
            )
