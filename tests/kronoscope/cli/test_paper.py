"""`examples/paper.yaml` run as a user runs it: the λ and κ that the papers mean are those that come out.

What is written is read by numpy alone, and its eigenvalues are computed anew in float64.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "paper.yaml"

Run = Callable[..., subprocess.CompletedProcess[str]]


def stabilised_sides(folder: Path) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    """Every stabilised side as a dense float64 matrix, from the files alone."""
    index = json.loads((folder / "stabilised.index.json").read_text())
    found = {}
    for layer in index["layers"]:
        tensors = load_file(folder / f"{layer['ordinal']}.safetensors")
        for side, prefix in (("A", "activation"), ("G", "gradient")):
            if f"{prefix}_covariance" in tensors:
                matrix = unpacked(tensors[f"{prefix}_covariance"].astype("float64"))
            elif f"{prefix}_values" in tensors:
                matrix = product(*(tensors[f"{prefix}_{part}"].astype("float64") for part in PARTS))
            else:
                continue
            found[layer["name"], side] = matrix
    return found


PARTS = ("values", "vectors", "floor")


def unpacked(triangle: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    size = int((8 * triangle.size + 1) ** 0.5 - 1) // 2
    matrix = np.zeros((size, size))
    matrix[np.triu_indices(size)] = triangle
    return matrix + np.triu(matrix, 1).T


def product(
    values: np.ndarray[Any, Any], vectors: np.ndarray[Any, Any], floor: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    # what is orthogonal to the kept directions is at the floor
    return (vectors * (values - floor)) @ vectors.T + floor * np.eye(vectors.shape[0])


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e6 * (1 + 1e-6)), ("float32", 1.02e6)])
def test_the_paper_preset_gives_the_damping_and_condition_numbers_that_it_names(
    kronoscope: Run, folder: Path, dtype: str, limit: float
) -> None:
    done = kronoscope("run", str(EXAMPLE), "--output", "paper", "-v", "--set", f"collection.dtype={dtype}")
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / "paper/results.json").read_text())["layers"]
    assert {row["kind"] for row in rows} == {"factors", "capacity", "reconstruction"}
    for row in rows:
        record = row["record"]
        # a block has no A to be damped
        assert (record["lambda_A"], record["lambda_G"]) == (1e-4 if record["in_dim"] > 1 else 0, 1e-4)
        assert (record["damping_split"], record["update_index"]) == ("each", 3)
        assert max(record["kappa_A_clipped"], record["kappa_G_clipped"]) <= 1e6
    sides = stabilised_sides(folder / "paper/artifacts/stabilised")
    assert len(sides) == 8
    for (layer, side), matrix in sides.items():
        values = np.linalg.eigvalsh(matrix)
        assert 0 < values[-1] <= limit * values[0], (layer, side)
    # the head's A is singular: 192 examples in 513 dimensions
    assert "λ_A=0.0001 λ_G=0.0001 policy=all T=192 rows=10 κ_A=inf→1e+06" in done.stderr
    assert "layers=5 woodbury=5 softmax=0 eigendecomposition=0 block=0 diagonal=0 policy=all" in done.stderr
    assert "damping=0.0001 (absolute, each)" in done.stderr
