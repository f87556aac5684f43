"""The analysis `compression`: structures that give the factors back, files that are proved before they are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from catalog.analyses.compression import CompressedSide, CompressionParams
from catalog.record import FieldError
from engine.analyses.compression import Compression
from engine.errors import BrokenFactors, StopRequested
from engine.factors.structure_files import INDEX, read_structures, write_structure_index, write_structures
from engine.semiseparable.semiseparable_matrix import MatrixRefused
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank
from engine.workspace import ModelInputs, Ports, Workspace
from kronoscope.local import Measurement, load_structures, measure
from tests.engine.semiseparable.matrices import matrices
from tests.engine.semiseparable.structures import SCALES, covariance, true_error
from tests.oracles import MemoryArtifacts, workspace
from worker.execution.files.matrix_file import MatrixFile
from worker.execution.refusal import Refusal

FLOAT64 = {"dtype": "float64", "self_check": "off"}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 5)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 20, generator=generator, dtype=torch.float64)
    return [(inputs, torch.randint(0, 5, (40,), generator=generator))]


def compressed(**options: Any) -> Measurement:
    return measure(
        net(), batches(), task="classification", kinds=("factors", "compression"), collection=FLOAT64,
        woodbury={"policy": "dense"}, params={"compression": options},
    )  # fmt: skip


def sides(measured: Measurement) -> dict[str, dict[str, CompressedSide]]:
    rows = measured.of("compression")
    return {
        name: {side: found for side in "AG" if (found := getattr(row.metrics, side)) is not None}
        for name, row in rows.items()
    }


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tolerance": 0.05},
        {"structure": "tridiagonal_lowrank", "rank": 6},
        {"structure": "tridiagonal_lowrank", "use_hierarchical": True, "num_levels": 2},
        {"structure": "tridiagonal_lowrank", "use_mixed_precision": True},
        {"structure": "block_sss", "block": 8, "order": 3},
        {"structure": "block_sss", "tolerance": 0.2},
    ],
    ids=str,
)
def test_each_side_is_held_with_its_error(options: dict[str, Any]) -> None:
    measured = compressed(**options)
    structures = read_structures(measured.artifacts)
    count = 0
    for name, found in sides(measured).items():
        for side, report in found.items():
            dense = measured.factors[name].G if side == "G" else measured.factors[name].A
            if report.structure == "dense":
                assert report.total_bytes == report.dense_bytes == dense.numel() * 8
                assert report.relative_error == 0
                assert side not in structures.get(name, {})
                continue
            matrix = structures[name][side]
            count += 1
            error = float((matrix.matvec(torch.eye(matrix.size, dtype=dense.dtype)) - dense).norm() / dense.norm())
            assert report.relative_error == pytest.approx(error, rel=1e-6, abs=1e-12)
            assert report.total_bytes == matrix.size_bytes
            assert report.dense_bytes is not None
            assert matrix.size_bytes < report.dense_bytes
            assert report.error_bound is None or report.error_bound >= error
            if "tolerance" in options:
                assert error <= options["tolerance"]
    assert count or options.get("structure") == "block_sss"
    summary = measured.summary["compression"]
    assert summary.total_bytes == sum(each.total_bytes for own in sides(measured).values() for each in own.values())
    assert summary.sides == sum(map(len, sides(measured).values())) == sum(summary.structures.values())


def test_two_runs_have_equal_digests() -> None:
    assert sides(compressed()) == sides(compressed())


def test_what_is_no_dense_matrix_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(32, 200))
    ids = torch.randint(0, 30, (12, 4))
    measured = measure(
        model, [(ids, torch.randint(0, 200, (12,)))], task="classification", kinds=("compression",),
        woodbury={"policy": "all"},
    )  # fmt: skip
    found = sides(measured)
    assert found["0"]["A"].structure == "diagonal"
    assert found["0"]["A"].why == "it stays as it is: it is diagonal"
    assert found["2"]["G"].structure == "softmax_head"
    assert "is not a dense matrix" in found["2"]["G"].why
    assert found["2"]["G"].total_bytes is None


def saved(folder: Path, **tensors: Tensor) -> Path:
    path = folder / "mine.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path


def quiet(*_: object) -> None:
    """Say nothing."""


def test_an_asymmetric_matrix_is_read_as_it_stands(tmp_path: Path) -> None:
    dense = matrices()["cauchy"][:128, :128].contiguous()
    read = MatrixFile(saved(tmp_path, H=dense), "H", quiet, symmetric=False)
    assert torch.equal(read.load_tensors("factors/matrix.safetensors")["matrix"], dense)
    space = Workspace(inputs=ModelInputs(stored=read), ports=Ports(artifacts=MemoryArtifacts()))
    space.options.kinds, space.options.decomposition = ("compression",), "none"
    (row,) = Compression(CompressionParams(), space).rows()
    # the mean of its triangles is zero, and it is not
    assert (row.status, row.metrics.G.structure) == ("covered", "block_sss")
    (found,) = read_structures(space.ports.artifacts).values()
    assert float((found["G"].to_dense() - dense).norm() / dense.norm()) == pytest.approx(row.metrics.G.relative_error)
    assert "not symmetric" in read.load_json("factors/factors.index.json")["layers"][0]["why"]
    with pytest.raises(Refusal, match="is not symmetric"):
        MatrixFile(saved(tmp_path, H=dense), "H", quiet)
    with pytest.raises(Refusal, match=r"has rows and working copies of .* host memory are left .*`memory.host`"):
        MatrixFile(saved(tmp_path, H=dense), "H", quiet, most_bytes=2 * dense.nbytes, symmetric=False)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(("dtype", "scale"), SCALES)
def test_a_job_records_the_true_error_at_every_scale(dtype: torch.dtype, scale: float, tmp_path: Path) -> None:
    dense = (covariance() * scale).to(dtype)
    read = MatrixFile(saved(tmp_path, H=dense), "H", quiet)
    for options in ({"tolerance": 0.4}, {"structure": "block_sss", "order": 3}):
        space = Workspace(inputs=ModelInputs(stored=read), ports=Ports(artifacts=MemoryArtifacts()))
        space.options.kinds, space.options.decomposition = ("compression",), "none"
        (row,) = Compression(CompressionParams(**options), space).rows()
        (found,) = read_structures(space.ports.artifacts).values()
        error = true_error(found["G"], dense, scale)
        assert row.metrics.G.relative_error == pytest.approx(error, rel=1e-3)
        if "order" in options:
            assert error <= row.metrics.G.error_bound <= error + 0.01


def test_a_tolerance_that_asks_for_too_much_leaves_it_dense(tmp_path: Path) -> None:
    read = MatrixFile(saved(tmp_path, H=matrices()["random"].contiguous()), "H", quiet, symmetric=False)
    space = Workspace(inputs=ModelInputs(stored=read), ports=Ports(artifacts=MemoryArtifacts()))
    space.options.kinds, space.options.decomposition = ("compression",), "none"
    (row,) = Compression(CompressionParams(structure="block_sss", tolerance=0.01), space).rows()
    assert row.metrics.G.structure == "dense"
    # 32 blocks of 16 rows: 2r² + 64r + 256 numbers each, of 8,192
    assert row.metrics.G.why == "dense: an order above 48 would be needed for a relative error of 0.01"
    assert row.metrics.artifact is None


def test_a_rank_beyond_the_matrix_is_refused(tmp_path: Path) -> None:
    read = MatrixFile(saved(tmp_path, H=torch.eye(20)), "H", quiet, symmetric=False)
    space = Workspace(inputs=ModelInputs(stored=read), ports=Ports(artifacts=MemoryArtifacts()))
    space.options.kinds, space.options.decomposition = ("compression",), "none"
    for options in ({"rank": 21}, {"structure": "block_sss", "order": 21}):
        with pytest.raises(MatrixRefused, match=r"must be from 1 to 20, the rows of the matrix \(got 21\)"):
            list(Compression(CompressionParams(**options), space).rows())


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"rank": 0}, "rank", "take 1 or more"),
        ({"num_levels": 0}, "num_levels", "take 1 or more"),
        ({"tolerance": 1.0}, "tolerance", "between 0 and 1"),
        ({"structure": "block_sss", "tolerance": 0.1, "order": 2}, "tolerance", "leave one out"),
        ({"structure": "tridiagonal_lowrank", "order": 2}, "order", "structure: block_sss"),
        ({"structure": "auto", "block": 8}, "block", "structure: block_sss"),
        ({"structure": "block_sss", "use_hierarchical": True}, "use_hierarchical", "structure: tridiagonal_lowrank"),
        ({"structure": "block_sss", "rank": 3}, "rank", "take `order`"),
        ({"structure": "tridiagonal_lowrank", "use_hierarchical": True, "rank": 3}, "rank", "leave one out"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(FieldError, match=words) as refused:
        CompressionParams(**options)
    assert refused.value.field == field


def test_a_job_that_is_cancelled_stops_within_a_layer() -> None:
    space = workspace(net(), batches(), "classification")
    space.options.kinds, space.options.decomposition = ("compression",), "none"
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked > 40:
            raise StopRequested("asked")

    space.ports.raise_if_cancelled = stop
    with pytest.raises(StopRequested):
        list(Compression(CompressionParams(), space).rows())


def written(folder: Path, change: Any) -> Path:
    """Structures in a folder, of which somebody has changed the index or the tensors."""
    artifacts = MemoryArtifacts()
    matrix = TridiagonalLowRank(torch.ones(6), torch.zeros(5), torch.zeros(5), torch.zeros(6, 2), torch.zeros(6, 2))
    write_structure_index(artifacts, [write_structures(artifacts, "layer", 0, {"G": matrix})])
    tensors, index = artifacts.load_tensors("structures/0.safetensors"), artifacts.load_json(INDEX)
    change(tensors, index, index["layers"][0])
    (folder / "structures").mkdir()
    safetensors.torch.save_file(tensors, folder / "structures" / "0.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    return folder


CHANGES: dict[str, Any] = {
    "a number": lambda tensors, index, entry: tensors.update({"G/diagonal": torch.full((6,), 2.0)}),
    "the size": lambda tensors, index, entry: entry["sides"]["G"].update(size=10**12),
    "the ranks": lambda tensors, index, entry: entry["sides"]["G"].update(ranks=[10**9]),
    "the kind": lambda tensors, index, entry: entry["sides"]["G"].update(kind="block_sss"),
    "no kind": lambda tensors, index, entry: entry["sides"]["G"].update(kind="another"),
    "a tensor more": lambda tensors, index, entry: tensors.update({"G/more": torch.zeros(1)}),
    "a side more": lambda tensors, index, entry: tensors.update({"B/U": torch.zeros(1)}),
    "a tensor less": lambda tensors, index, entry: tensors.pop("G/U"),
    "a shape": lambda tensors, index, entry: tensors.update({"G/U": torch.zeros(6, 3)}),
    "the format": lambda tensors, index, entry: index.update(format="another"),
    "the file": lambda tensors, index, entry: entry.update(file="../../etc/passwd"),
    "a rank below 0": lambda tensors, index, entry: entry["sides"]["G"].update(ranks=[3, -1]),
    "a layer twice": lambda tensors, index, entry: index["layers"].append(entry),
    "no name": lambda tensors, index, entry: entry.update(name=None),
    "an empty name": lambda tensors, index, entry: entry.update(name=""),
    "the entry": lambda tensors, index, entry: entry.update(sides=[]),
}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("change", list(CHANGES))
def test_changed_files_are_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenFactors, match="no structures can be read"):
        load_structures(written(tmp_path, CHANGES[change]))


def test_files_as_they_were_written_are_read(tmp_path: Path) -> None:
    written(tmp_path, lambda *_: None)
    for folder in (tmp_path, tmp_path / "structures", str(tmp_path)):
        assert load_structures(folder)["layer"]["G"].size == 6
    cut = tmp_path / "structures" / "0.safetensors"
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(BrokenFactors, match="no structures can be read"):
        load_structures(tmp_path)
    with pytest.raises(BrokenFactors, match="holds no structures; give the folder"):
        load_structures(tmp_path / "none")
