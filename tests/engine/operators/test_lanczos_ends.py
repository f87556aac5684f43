"""Every eigenvalue among the wanted ones of known spectra is found with its multiplicity, and every bound is true."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import NonFiniteFactor, WrongShape
from engine.operators.extreme_eigenvalues import Eigenvalue, ExtremeEigenvalues
from engine.operators.krylov.search_options import SearchOptions, search_bytes
from tests.known_spectra import NAMES, matrix, spectrum
from tests.memory_profile import peak_bytes

OPTIONS = SearchOptions(
    count=7, end="both", tolerance=None, seed=3, dtype=torch.float64, most_products=4000, length=None
)  # fmt: skip
ROOT = Path(__file__).parents[3]


def searched(full: Tensor, options: SearchOptions) -> ExtremeEigenvalues:
    search = ExtremeEigenvalues(len(full), options)
    while not search.done:
        search.advance(full @ search.vectors)
    return search


def assert_true(found: tuple[Eigenvalue, ...], truth: Tensor, *, rounding: float = 1e-14) -> None:
    """Place by place; the dense eigenvalues are themselves rounded."""
    assert len(found) == len(truth)
    for entry, value in zip(found, truth.tolist(), strict=True):
        assert entry.converged
        assert abs(entry.value - value) <= entry.bound + rounding * float(truth.abs().max())


def locked(search: ExtremeEigenvalues) -> Tensor:
    return search._basis.rows[: search._number["locked"]]


@pytest.mark.part(of=32, by=("name",))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("end", ["largest", "smallest", "both"])
def test_every_eigenvalue_is_found_and_every_bound_is_true(name: str, dtype: torch.dtype, end: str) -> None:
    full = matrix(spectrum(name, 300)).to(dtype)
    truth = torch.linalg.eigvalsh(full.double())
    options = replace(OPTIONS, dtype=dtype, end=end)
    search = searched(full, options)
    result = search.result()
    scale = float(truth.abs().max())
    if end != "smallest":
        assert_true(result.largest, truth.flip(0)[:7])
    if end != "largest":
        assert_true(result.smallest, truth[:7])
    # a bound that says nothing would be true as well; 5 > 2/√3 · √14, for 14 residuals at the tolerance
    allowed = (5 * torch.finfo(dtype).eps ** 0.5 + 1e3 * torch.finfo(dtype).eps) * scale
    assert max(entry.bound for entry in result.largest + result.smallest) <= allowed
    assert search.products <= options.most_products


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_a_short_basis_restarts_and_finds_them_too(name: str, seed: int) -> None:
    full = matrix(spectrum(name, 300), seed)
    truth = torch.linalg.eigvalsh(full)
    result = searched(full, replace(OPTIONS, length=40, tolerance=1e-5, seed=seed)).result()
    assert_true(result.largest, truth.flip(0)[:7])
    assert_true(result.smallest, truth[:7])


@pytest.mark.part(of=16, by=("dtype",))
@pytest.mark.parametrize(
    ("values", "count"),
    [
        ([2.5], 1),
        ([-1.0, 3.0], 2),
        ([0.0] * 9, 4),
        ([1.0] * 40, 3),
        ([5.0, 5.0, 5.0, 1.0, 1.0, 0.0], 6),
        ([7.0, 7.0, 7.0, 7.0, 7.0, *([0.0] * 55)], 10),
        ([1e-30, 2e-30, 3e-30], 3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_invariant_subspaces_are_left_and_small_matrices_exhausted(
    values: list[float], count: int, dtype: torch.dtype
) -> None:
    truth = torch.tensor(values, dtype=torch.float64).sort().values
    full = matrix(truth).to(dtype)
    truth = torch.linalg.eigvalsh(full.double())
    result = searched(full, replace(OPTIONS, count=count, dtype=dtype, length=None, most_products=500)).result()
    assert_true(result.largest, truth.flip(0)[:count])
    assert_true(result.smallest, truth[:count])


def test_vectors_belong_to_their_eigenvalues() -> None:
    full = matrix(spectrum("threefold multiples", 300))
    search = searched(full, OPTIONS)
    values, vectors = search._found[0, :14], locked(search).T
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(14, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(full @ vectors, vectors * values, rtol=0, atol=1e-6)


def test_what_the_products_do_not_suffice_for_says_so_and_lies_near_an_eigenvalue() -> None:
    full = matrix(spectrum("threefold multiples", 300))
    truth = torch.linalg.eigvalsh(full)
    for most in (1, 10, 40, 60):
        search = searched(full, replace(OPTIONS, most_products=most))
        assert search.products <= most
        for entry in search.result().largest + search.result().smallest:
            assert not entry.converged
            assert float((truth - entry.value).abs().min()) <= entry.bound


@pytest.mark.part(of=16, by=("length",))
@pytest.mark.parametrize("length", [None, 34])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_search_goes_on_from_any_state_bit_by_bit(length: int | None, dtype: torch.dtype) -> None:
    full = matrix(spectrum("low rank", 120)).to(dtype)
    options = replace(OPTIONS, length=length, dtype=dtype)
    through = searched(full, options)
    search = ExtremeEigenvalues(120, options)
    while not search.done:
        following = ExtremeEigenvalues(120, options)
        following.restore({name: numbers.clone() for name, numbers in search.state().items()})
        search = following
        search.advance(full @ search.vectors)
    assert search.result() == through.result()
    assert search.products == through.products
    assert torch.equal(locked(search), locked(through))


CONTINUED = """
import sys, torch
from engine.operators.extreme_eigenvalues import ExtremeEigenvalues
from tests.engine.operators.test_lanczos_ends import OPTIONS, locked
full, state = torch.load(sys.argv[1])
search = ExtremeEigenvalues(len(full), OPTIONS)
search.restore(state)
while not search.done:
    search.advance(full @ search.vectors)
torch.save((search._found, locked(search)), sys.argv[2])
"""


@pytest.mark.nightly(
    covered_by=(
        "tests/engine/operators/test_lanczos_ends.py::test_a_search_goes_on_from_any_state_bit_by_bit",
        "tests/worker/execution/test_search_resume.py::test_another_attempt_takes_over_what_a_killed_one_has_searched",
    )
)
def test_another_process_ends_with_the_same_bits(tmp_path: Path) -> None:
    full = matrix(spectrum("bulk with outliers", 150))
    through = searched(full, OPTIONS)
    search = ExtremeEigenvalues(150, OPTIONS)
    for _ in range(70):
        search.advance(full @ search.vectors)
    assert not search.done
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    torch.save((full, search.state()), before)
    subprocess.run([sys.executable, "-c", CONTINUED, before, after], check=True, cwd=ROOT)
    found, rows = torch.load(after)
    assert torch.equal(found, through._found)
    assert torch.equal(rows, locked(through))


def test_two_searches_agree_bit_by_bit_and_seeds_differ() -> None:
    full = matrix(spectrum("clusters", 150))
    assert searched(full, OPTIONS).result() == searched(full, OPTIONS).result()
    first, other = ExtremeEigenvalues(150, OPTIONS), ExtremeEigenvalues(150, replace(OPTIONS, seed=4))
    assert not torch.equal(first.vectors, other.vectors)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("length", [None, 60])
def test_the_memory_is_the_stated_one(length: int | None) -> None:
    size, options = 100_000, replace(OPTIONS, length=length, most_products=80, dtype=torch.float32)
    scales = torch.linspace(-1, 1, size)[:, None]

    def search() -> None:
        searching = ExtremeEigenvalues(size, options)
        while not searching.done:
            searching.advance(scales * searching.vectors)

    used = peak_bytes(search)
    stated = search_bytes(size, options)
    assert used <= stated
    # three blocks of eight are allowed for, of which a search that never widens uses one
    assert stated - used <= 3 * 8 * 8 * size + 2**25


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": 8}, r"between 1 and the 5 rows .* \(got 8\)"),
        ({"count": 0}, r"\(got 0\)"),
        ({"end": "middle"}, "largest, smallest, both"),
        ({"dtype": torch.float16}, "float32 or float64"),
        ({"most_products": 0}, "at least 1"),
        ({"tolerance": 0.0}, "between 0 and 1"),
        ({"tolerance": float("nan")}, "between 0 and 1"),
        ({"count": 2, "length": 4}, r"at least 5.*\(got 4\)"),
    ],
)
def test_options_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ExtremeEigenvalues(5, replace(OPTIONS, **{"count": 1, **change}))


def test_products_that_cannot_be_are_refused() -> None:
    search = ExtremeEigenvalues(6, replace(OPTIONS, count=1))
    with pytest.raises(WrongShape, match=r"\(6, 1\) \(got \(5, 1\)\)"):
        search.advance(torch.zeros(5, 1, dtype=torch.float64))
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteFactor, match="NaN or Inf"):
            search.advance(torch.full((6, 1), wrong, dtype=torch.float64))
    ended = searched(torch.eye(6, dtype=torch.float64), replace(OPTIONS, count=1))
    with pytest.raises(ValueError, match="is done"):
        ended.advance(torch.zeros(6, 1, dtype=torch.float64))


def test_a_state_of_another_search_is_refused() -> None:
    state = ExtremeEigenvalues(30, OPTIONS).state()
    with pytest.raises(ValueError, match="of this search"):
        ExtremeEigenvalues(30, replace(OPTIONS, seed=9)).restore(state)
    with pytest.raises(ValueError, match="of this search"):
        ExtremeEigenvalues(31, OPTIONS).restore(state)
