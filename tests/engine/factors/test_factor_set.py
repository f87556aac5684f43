"""Where factors are after a collection, and in which precision."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from engine.accumulation.layer_statistics import LayerStatistics
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.errors import NonFiniteFactor
from engine.factors.factor_files import read_factors
from engine.factors.factor_set import CountedExamples, Run
from engine.factors.kronecker_factors import digest, to_storage
from engine.memory.plan import Chosen
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, collect, relative_error, workspace

EPSILON = {"float64": 0.0, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


class Large(nn.Module):
    """Six layers of 256 to 400, two of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(300, 256), nn.Linear(300, 256)
        self.deep = nn.Sequential(nn.Linear(256, 400), nn.Tanh(), nn.Linear(400, 256), nn.Tanh(), nn.Linear(256, 256))
        self.head = nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deep(torch.tanh(self.q(x)) * self.k(x)))


def space(**options: object) -> Workspace:
    torch.manual_seed(0)
    x, y = torch.randn(12, 300), torch.randint(0, 3, (12,))
    return workspace(Large(), [(x, y)], "classification", **({"fisher": "mc", "dtype": "float32"} | options))


@pytest.mark.part(of=16, by=("storage",))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("storage", [None, "float32", "float64", "bfloat16", "float16"])
def test_every_factor_of_large_layers_is_on_the_host_as_asked(
    dtype: str, storage: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[LayerStatistics] = []
    allocate = LayerStatistics.allocate

    def remembered(self: LayerStatistics, *place: object) -> None:
        allocate(self, *place)  # type: ignore[arg-type]
        sums.append(self)

    monkeypatch.setattr(LayerStatistics, "allocate", remembered)
    whole, truth = collect_or_read(space(dtype=dtype, storage_dtype=storage)), collect_or_read(space(dtype=dtype))
    assert len(whole.layers) == 6
    assert len(sums) == 12
    # nothing of the sums is left behind
    assert all(found.A is None and found.G is None for found in sums)
    kept = getattr(torch, storage or dtype)
    for layer in whole.layers:
        found, exact = whole.load(layer.ordinal), truth.load(layer.ordinal)
        for side in ("A", "G"):
            stored, scale = getattr(found, side), getattr(found, f"scale_{side}")
            assert stored.device.type == "cpu"
            assert stored.dtype == kept
            assert torch.equal(stored, stored.T)
            assert scale == 1 or storage == "float16"
            wide = stored.to(torch.float64) * scale
            assert relative_error(wide, getattr(exact, side).to(torch.float64)) <= EPSILON[storage or "float64"]
            assert torch.equal(getattr(found, f"widened_{side}").to(torch.float64), wide)
    assert whole.load(0).A is whole.load(1).A


def test_rows_say_what_is_stored_and_spectra_are_of_that() -> None:
    made = space(storage_dtype="float16")
    made.options.kinds = ("factors",)
    rows = [row for row in KeptFactors(None, made).rows() if row.status == "covered"]
    whole, again = collect_or_read(made), read_factors(made.ports.artifacts)
    for row in rows:
        layer = whole.layers[row.ordinal]
        record, factors, read = row.record, whole.load(layer.ordinal), again.load(layer.ordinal)
        assert (record.dtype, record.accumulation_dtype, record.storage_device) == ("float16", "float32", "cpu")
        assert (record.digest_A, record.digest_G) == (digest(factors.A), digest(factors.G))
        assert (record.scale_A, record.scale_G) == (factors.scale_A, factors.scale_G)
        assert (digest(read.A), digest(read.G)) == (record.digest_A, record.digest_G)
        assert (read.scale_A, read.scale_G) == (factors.scale_A, factors.scale_G)
        spectrum = torch.tensor(
            made.ports.artifacts.load_json(f"spectra/{layer.ordinal}.json")["G"], dtype=torch.float64
        )
        truth = torch.linalg.eigvalsh(factors.G.to(torch.float64) * factors.scale_G)
        # what rounding alone put beyond the rank is not curvature
        bound = layer.rank_bound_G or truth.numel()
        assert torch.allclose(spectrum[-bound:], truth[-bound:].clamp_min(0), rtol=1e-9, atol=0)
        assert row.metrics.trace_G == pytest.approx(float(factors.widened_G.trace()), rel=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1.0, 3e5, 1e30])
def test_float16_neither_underflows_nor_overflows(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 7, generator=generator, dtype=torch.float64)
    matrix = (rows.T @ rows * size).to(torch.float32)
    stored, scale = to_storage(matrix, torch.float16)
    assert math.frexp(scale)[0] == 0.5
    assert 2**14 <= float(stored.max()) < 2**15
    assert relative_error(stored.to(torch.float64) * scale, matrix.to(torch.float64)) < 2**-11
    zero, one = to_storage(torch.zeros(3, 3), torch.float16)
    assert (float(zero.abs().max()), one) == (0, 1)


def test_what_a_storage_cannot_hold_names_it() -> None:
    x = torch.full((4, 2), 1e25, dtype=torch.float64)
    with pytest.raises(NonFiniteFactor, match="storage_dtype"):
        collect(nn.Linear(2, 2), [(x, torch.zeros(4, 2))], "regression", fisher="forward_only", storage_dtype="float32")


def test_laid_aside_factors_keep_their_scale() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    x, y = torch.randn(9, 6) * 1e-4, torch.randint(0, 2, (9,))
    made = [workspace(model, [(x, y)], "classification", fisher="mc", storage_dtype="float16") for _ in range(2)]
    made[1].ports.scratch = MemoryArtifacts()
    made[1].resume.chosen = Chosen(parts=(("0",), ("2",)), micro_batch=4)
    whole, aside = (collect_or_read(one) for one in made)
    assert aside.passes == 2
    for ordinal in range(2):
        left, right = whole.load(ordinal), aside.load(ordinal)
        assert replace(left, A=x, G=x) == replace(right, A=x, G=x)
        assert torch.equal(left.A, right.A)
        assert torch.equal(left.G, right.G)
    assert aside.load(0).scale_A < 1


@pytest.mark.parametrize(("runs", "count"), [((), 0), (((0, 5),), 5), (((2, 4), (10, 17)), 9)])
def test_examples_are_counted_run_by_run(runs: tuple[tuple[int, int], ...], count: int) -> None:
    counted = CountedExamples(
        runs=tuple(Run(begin=begin, end=end) for begin, end in runs),
        terms_weight=float(count),
        begin=0,
        whole=None,
        model="",
        unmasked=(),
        overwritten=(),
    )
    assert counted.count == count
