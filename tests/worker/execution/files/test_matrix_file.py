"""A matrix of one's own: every fault named, and the reconstruction against the definition in float64."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from catalog.analyses.capacity import CapacityParams
from catalog.analyses.reconstruction import ReconstructionParams
from catalog.record import plain
from catalog.requests.collection import Stabilisation
from engine.analyses.capacity import Capacity
from engine.analyses.reconstruction import Reconstruction
from engine.errors import BrokenFactors, NonFiniteFactor
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace
from kronoscope.local import load_stabilised
from kronoscope.local_inputs import OptionRefused
from tests.oracles import MemoryArtifacts
from worker.execution.attempt import parse_document
from worker.execution.files.matrix_file import MatrixFile
from worker.execution.refusal import Refusal


def quiet(level: str, message: str) -> None:
    """Say nothing."""


def symmetric(values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    size = values.numel()
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))).Q
    matrix = (basis * values) @ basis.mT
    return ((matrix + matrix.mT) / 2).to(dtype)


def saved(folder: Path, **tensors: Tensor) -> Path:
    path = folder / "mine.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path


def space_of(path: Path, tensor: str | None, said: list[str]) -> Workspace:
    return Workspace(
        inputs=ModelInputs(
            model=None,
            batches=None,
            task=None,
            stored=MatrixFile(path, tensor, lambda level, message: said.append(f"{level}: {message}")),
        ),
        options=JobOptions(stabilisation=Stabilisation(kappa_max=1e3), decomposition="vectors"),
        ports=Ports(artifacts=MemoryArtifacts(), log=lambda level, message: said.append(f"{level}: {message}")),
    )


def stabilised(path: Path, tensor: str | None = None, **options: Any) -> tuple[Any, Tensor, list[str]]:
    said: list[str] = []
    space = space_of(path, tensor, said)
    (row,) = Reconstruction(ReconstructionParams(**options), space).rows()
    kept: Any = space.ports.artifacts
    tensors = kept.tensors["stabilised/matrix.safetensors"]
    return row, tensors.get(row.layer), said


SPECTRUM = torch.logspace(-7, 0, 90, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)]
)
def test_it_comes_back_square_under_its_name_in_its_precision(tmp_path: Path, dtype: torch.dtype, most: float) -> None:
    given = symmetric(SPECTRUM, dtype)
    row, found, _ = stabilised(saved(tmp_path, hessian=given))
    values, basis = torch.linalg.eigh(given.double())
    truth = (basis * values.clamp_min(float(values[-1]) / 1e3)) @ basis.mT
    assert found.dtype == dtype
    assert torch.equal(found, found.mT)
    assert float((found.double() - truth).norm() / truth.norm()) <= most
    assert (row.layer, row.metrics.A, row.record.fisher, row.record.seed) == ("hessian", None, None, None)
    assert row.metrics.G.clipped == int((values < values[-1] / 1e3).sum())
    assert row.metrics.G.mass == pytest.approx(float(truth.trace() - values.sum()), rel=1e-6)


def test_an_indefinite_one_is_told_and_clipped_like_any(tmp_path: Path) -> None:
    values = SPECTRUM.clone()
    values[:2] = torch.tensor([-0.4, -0.01], dtype=torch.float64)
    given = symmetric(values)
    row, found, said = stabilised(saved(tmp_path, m=given))
    spectrum, basis = torch.linalg.eigh(given)
    truth = (basis * spectrum.clamp_min(float(spectrum[-1]) / 1e3)) @ basis.mT
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-13)
    assert row.metrics.G.smallest == pytest.approx(-0.4, rel=1e-12)
    assert row.metrics.G.mass == pytest.approx(float(truth.trace() - given.trace()), rel=1e-10)
    assert any("warning: `m` is indefinite: the smallest eigenvalue is -0.4" in line for line in said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_eigenvalues_below_zero_are_not_scaled_by_vectors_kept_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    given = symmetric(torch.tensor([-0.9, -0.6, -0.3, 0.2, 1.0], dtype=torch.float64), dtype)
    row, _, _ = stabilised(saved(tmp_path, m=given))
    wide = given.double()
    assert row.metrics.G.smallest == pytest.approx(float(torch.linalg.eigvalsh(wide)[0]), rel=1e-12)
    assert row.metrics.G.trace == pytest.approx(float(wide.trace()), abs=1e-12)


def test_one_without_a_positive_eigenvalue_has_no_floor(tmp_path: Path) -> None:
    with pytest.raises(BrokenFactors, match="has no positive eigenvalue"):
        stabilised(saved(tmp_path, m=-symmetric(SPECTRUM)))


def test_its_eigenbasis_alone(tmp_path: Path) -> None:
    given = symmetric(SPECTRUM)
    row, found, _ = stabilised(saved(tmp_path, m=given), route="eigenbasis")
    assert found is None
    assert row.metrics.G.update == "eigenbasis"


@pytest.mark.parametrize("route", ["rebuild", "eigenbasis"])
@pytest.mark.parametrize("placement", ["device", "panels", "host"])
@pytest.mark.parametrize("named", ["m", "activation"])
def test_what_it_left_is_read_back_and_inverted_through(tmp_path: Path, route: str, placement: str, named: str) -> None:
    given = symmetric(SPECTRUM)
    space = space_of(saved(tmp_path, **{named: given}), None, [])
    list(Reconstruction(ReconstructionParams(route=route, placement=placement), space).rows())  # type: ignore[arg-type]
    left: Any = space.ports.artifacts
    for name in (*left.tensors, *left.tables):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    for name, tensors in left.tensors.items():
        safetensors.torch.save_file(tensors, tmp_path / name)
    for name, table in left.tables.items():
        (tmp_path / name).write_text(json.dumps(table, allow_nan=False))
    with pytest.raises(OptionRefused, match=r"`device` must be one that this machine's PyTorch has \(got 'nowhere'"):
        load_stabilised(tmp_path, device="nowhere")
    inverses = load_stabilised(tmp_path, device="cpu")
    assert list(inverses) == [named]
    right = torch.randn(90, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values, basis = torch.linalg.eigh(given)
    truth = basis @ ((basis.T @ right) / (values.clamp_min(1e-3) + 0.1)[:, None])
    torch.testing.assert_close(inverses[named].solve(right, damping_G=0.1), truth, rtol=1e-9, atol=1e-9)


LEAST = 5e-324
MAGNITUDES = [1e300, 1e154, 1e-154, 1e-300, 1e-310, 1e-318]


@pytest.mark.parametrize("route", ["rebuild", "eigenbasis"])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_every_number_of_a_matrix_of_any_magnitude_is_finite(tmp_path: Path, magnitude: float, route: str) -> None:
    given = symmetric(torch.logspace(-5, 0, 20, dtype=torch.float64))
    # in two steps, for what is below the least normal number
    matrix = given * math.sqrt(magnitude) * math.sqrt(magnitude)
    space = space_of(saved(tmp_path, m=matrix), None, [])
    rows = Reconstruction(ReconstructionParams(route=route), space).rows()  # type: ignore[arg-type]
    row = next(rows)
    with pytest.raises(StopIteration) as ended:
        next(rows)
    json.dumps(plain([row, ended.value.value]), allow_nan=False)
    side = row.metrics.G  # type: ignore[union-attr]
    coarse = 1e-6 + 90 * LEAST / (1e-5 * magnitude)
    assert side.kappa_reached / (1000 * (1 - coarse)) == pytest.approx(1, rel=2 * coarse)
    assert side.trace == pytest.approx(float(matrix.trace()), rel=coarse)
    assert side.relative_error is None or side.relative_error <= coarse
    (kept,) = space.ports.artifacts.tensors.values()  # type: ignore[attr-defined]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in kept.values())


@pytest.mark.parametrize("magnitude", [1e300, 1e-310])
def test_the_metrics_of_a_matrix_of_any_magnitude_are_finite_or_null_with_the_reason(
    tmp_path: Path, magnitude: float
) -> None:
    given = symmetric(torch.logspace(-5, 0, 20, dtype=torch.float64))
    matrix = given * math.sqrt(magnitude) * math.sqrt(magnitude)
    rows = Capacity(CapacityParams(), space_of(saved(tmp_path, m=matrix), None, [])).rows()
    row = next(rows)
    with pytest.raises(StopIteration) as ended:
        next(rows)
    json.dumps(plain([row, ended.value.value]), allow_nan=False)
    assert row.metrics.trace == pytest.approx(float(matrix.trace()), rel=1e-6)  # type: ignore[union-attr]


def test_the_least_number_is_not_rounded_away(tmp_path: Path) -> None:
    given = torch.diag(torch.tensor([LEAST, 1.0], dtype=torch.float64))
    _, found, _ = stabilised(saved(tmp_path, m=given))
    assert float(found[0, 0]) == 1e-3
    read = MatrixFile(saved(tmp_path, m=given), None, quiet).load_tensors("factors/0.safetensors")
    assert read["gradient_covariance"].tolist() == [LEAST, 0.0, 1.0]


def test_eigenvalues_beyond_float64_are_refused_by_their_own_reason(tmp_path: Path) -> None:
    given = torch.full((4, 4), 1.7e308, dtype=torch.float64)
    with pytest.raises(NonFiniteFactor, match=r"must be below 1\.8e\+308.*divide it by a power of two"):
        stabilised(saved(tmp_path, m=given))


def test_rounding_between_the_triangles_is_averaged_and_told(tmp_path: Path) -> None:
    given = symmetric(SPECTRUM, torch.float32)
    given[3, 4] += 2e-7
    _, found, said = stabilised(saved(tmp_path, m=given))
    assert torch.equal(found, found.mT)
    assert any("is asymmetric by" in line for line in said)


def test_one_of_several_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, a=torch.eye(3), b=torch.eye(4))
    assert MatrixFile(path, "b", quiet).load_tensors("factors/0.safetensors")["gradient_covariance"].numel() == 10
    with pytest.raises(Refusal, match="holds 2 tensors; name one of `a`, `b`"):
        MatrixFile(path, None, quiet)
    with pytest.raises(Refusal, match="no tensor of that name; there are `a`, `b`"):
        MatrixFile(path, "c", quiet)


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        (torch.ones(3, 4), r"has shape \[3, 4\]; give a square matrix"),
        (torch.ones(3), r"has shape \[3\]"),
        (torch.ones(0, 0), r"has shape \[0, 0\]"),
        (torch.ones(2, 2, dtype=torch.int64), "is of type I64; take one of F64"),
        (torch.tensor([[1.0, math.nan], [math.nan, 1.0]]), "holds NaN or Inf in 2 of its 4 numbers"),
        (torch.tensor([[1.0, math.inf], [math.inf, 1.0]]), "holds NaN or Inf in 2 of its 4 numbers"),
        (torch.tensor([[1.0, 0.5], [0.4, 1.0]]), r"is not symmetric: its triangles differ by 0\.1 of the largest"),
    ],
)
def test_what_is_no_symmetric_matrix_is_refused(tmp_path: Path, matrix: Tensor, said: str) -> None:
    with pytest.raises(Refusal, match=said) as caught:
        MatrixFile(saved(tmp_path, m=matrix), None, quiet)
    assert caught.value.pointer == "/factors/path"


def test_a_matrix_in_a_file_has_a_path() -> None:
    with pytest.raises(Exception, match="names a matrix in a file"):
        parse_document({"kind": "reconstruction", "factors": {"job": "x", "tensor": "m"}})
