"""Structures: every verb equals that of the dense matrix, in float64."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import NonFiniteFactor, WrongShape
from engine.linalg.linear_operator import LinearOperator
from engine.semiseparable.block_sss import BlockSSS
from engine.semiseparable.fit import fit_tridiagonal_low_rank
from engine.semiseparable.semiseparable_matrix import (
    MatrixRefused,
    SemiseparableMatrix,
    SingularMatrix,
    level_ranks,
    require_matrix,
)
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank, formula_bytes
from tests.engine.semiseparable.structures import REAL, Draw, cases, covariance, sss, tridiagonal

CASES = cases()


def close(found: Tensor, wanted: Tensor, most: float = 1e-10) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert float((found - wanted).abs().max()) <= most * max(1.0, float(wanted.abs().max()))


def sss_of_four(size: int, most: int, dtype: torch.dtype) -> tuple[BlockSSS, Tensor]:
    return sss(size, 4, most, dtype)


@pytest.fixture(params=list(CASES))
def pair(request: pytest.FixtureRequest) -> tuple[SemiseparableMatrix, Tensor]:
    return CASES[request.param]


@pytest.mark.parametrize("columns", [None, 1, 5])
def test_products_and_solves_are_those_of_the_dense_matrix(
    pair: tuple[SemiseparableMatrix, Tensor], columns: int | None
) -> None:
    matrix, dense = pair
    close(matrix.to_dense(), dense)
    shape = (matrix.size,) if columns is None else (matrix.size, columns)
    x = Draw(9, dense.dtype)(*shape)
    close(matrix.matvec(x), dense @ x)
    close(matrix.rmatvec(x), dense.T @ x)
    close(matrix.solve(x), torch.linalg.solve(dense, x))


def test_determinant_and_inverse_are_those_of_the_dense_matrix(pair: tuple[SemiseparableMatrix, Tensor]) -> None:
    matrix, dense = pair
    sign, logarithm = matrix.slogdet()
    wanted = torch.linalg.slogdet(dense)
    close(sign, wanted[0])
    close(logarithm, wanted[1])
    close(matrix.inverse_diagonal(), torch.linalg.inv(dense).diagonal())


def test_a_structure_is_a_linear_operator_and_refuses_what_needs_symmetry(
    pair: tuple[SemiseparableMatrix, Tensor],
) -> None:
    matrix, dense = pair
    assert isinstance(matrix, LinearOperator)
    x, eye = Draw(9, dense.dtype)(matrix.size, 2), torch.eye(matrix.size, dtype=dense.dtype)
    close(matrix.apply(x), dense @ x)
    close(matrix.solve(x, 0.5), torch.linalg.solve(dense + 0.5 * eye, x))
    shifts = torch.tensor([0.5, 2.0], dtype=REAL)
    close(matrix.logdets(shifts), torch.stack([torch.linalg.slogdet(dense + s * eye)[1] for s in shifts]))
    close(matrix.to_dense(torch.complex128), dense.to(torch.complex128))
    for refused in (
        lambda: matrix.spectrum("layer"),
        lambda: matrix.power(-1.0, "layer"),
        lambda: matrix.clip(1e6, "layer"),
    ):
        with pytest.raises(MatrixRefused, match=f"`{matrix.kind}` need not be symmetric, so it has no"):
            refused()


@pytest.mark.parametrize("z", [0.25, 0.25 + 0.5j])
def test_a_shift_is_that_of_the_diagonal(pair: tuple[SemiseparableMatrix, Tensor], z: complex) -> None:
    matrix, dense = pair
    shifted, wanted = matrix.shifted(z), dense - z * torch.eye(matrix.size, dtype=REAL)
    close(shifted.to_dense(), wanted)
    close(shifted.inverse_diagonal(), torch.linalg.inv(wanted).diagonal())
    x = Draw(9, dense.dtype)(matrix.size, 2)
    close(shifted.solve(x), torch.linalg.solve(wanted, x.to(wanted.dtype)))
    close(shifted.slogdet()[0], torch.linalg.slogdet(wanted)[0])


def test_a_complex_vector_meets_a_real_matrix(pair: tuple[SemiseparableMatrix, Tensor]) -> None:
    matrix, dense = pair
    x = Draw(9, torch.complex128)(matrix.size, 2)
    close(matrix.matvec(x), dense.to(x.dtype) @ x)
    close(matrix.solve(x), torch.linalg.solve(dense.to(x.dtype), x))


def test_what_is_read_is_what_was_held(pair: tuple[SemiseparableMatrix, Tensor]) -> None:
    matrix, dense = pair
    again = type(matrix).read(matrix.tensors(), matrix.facts())
    assert torch.equal(again.to_dense(), matrix.to_dense())
    assert again.facts() == matrix.facts()
    assert matrix.size_bytes == sum(tensor.nbytes for tensor in matrix.tensors().values())
    single = torch.complex64 if dense.is_complex() else torch.float32
    close(matrix.to("cpu", single).to_dense(), dense.to(single), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision_gives_single_precision(dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else REAL
    for matrix, dense in (tridiagonal(61, 3, wide), sss(61, 8, 3, wide)):
        narrow = matrix.to(dtype=dtype)
        x = Draw(9, dtype)(61, 2)
        for found, wanted in (
            (narrow.matvec(x), dense @ x.to(wide)),
            (narrow.solve(x), torch.linalg.solve(dense, x.to(wide))),
        ):
            assert found.dtype == dtype
            assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


def verbs() -> dict[str, Callable[[SemiseparableMatrix, Tensor], Tensor]]:
    return {
        "matvec": lambda matrix, x: matrix.matvec(x),
        "rmatvec": lambda matrix, x: matrix.rmatvec(x),
        "solve": lambda matrix, x: matrix.solve(x),
        "slogdet": lambda matrix, x: matrix.slogdet()[1],
        "inverse_diagonal": lambda matrix, x: matrix.inverse_diagonal(),
        "shifted": lambda matrix, x: matrix.shifted(0.5 + 0.5j).inverse_diagonal(),
        "to_dense": lambda matrix, x: matrix.to_dense(),
    }


@pytest.mark.parametrize("verb", list(verbs()))
@pytest.mark.parametrize("kind", ["tridiagonal", "sss"])
def test_gradients_flow_to_the_generators(kind: str, verb: str) -> None:
    matrix: SemiseparableMatrix = tridiagonal(11, 2, REAL)[0] if kind == "tridiagonal" else sss(11, 3, 2, REAL)[0]
    names, tensors = zip(*matrix.tensors().items(), strict=True)
    held = [tensor.clone().requires_grad_() for tensor in tensors]
    x = Draw(9, REAL)(11, 2)

    def call(*given: Tensor) -> Tensor:
        again = type(matrix).read(dict(zip(names, given, strict=True)), matrix.facts())
        found = verbs()[verb](again, x)
        return torch.view_as_real(found) if found.is_complex() else found

    assert torch.autograd.gradcheck(call, held, fast_mode=True)


def exchange(size: int) -> TridiagonalLowRank:
    """Neighbours exchanged in pairs: every odd leading block is singular, and the matrix is its own inverse."""
    beside = torch.zeros(size - 1, dtype=REAL)
    beside[::2] = 1
    none = torch.zeros(size, 0, dtype=REAL)
    return TridiagonalLowRank(torch.zeros(size, dtype=REAL), beside, beside, none, none)


@pytest.mark.parametrize("block", [1, 3, 7, None])
def test_a_singular_leading_block_is_solved(block: int | None) -> None:
    matrix = exchange(40).as_sss(block)
    x = Draw(9, REAL)(40, 3)
    close(matrix.solve(x), matrix.matvec(x), 1e-14)
    sign, logarithm = matrix.slogdet()
    assert float(sign) == 1  # twenty exchanges
    assert abs(float(logarithm)) <= 1e-13
    assert float(matrix.inverse_diagonal().abs().max()) <= 1e-14


def test_a_singular_tridiagonal_part_is_solved() -> None:
    draw = Draw(3, REAL)
    zeros = torch.zeros(20, dtype=REAL)
    matrix = TridiagonalLowRank(zeros, zeros[1:], zeros[1:], draw(20, 20), draw(20, 20))
    dense = matrix.U @ matrix.V.T
    x = draw(20, 2)
    close(matrix.solve(x), torch.linalg.solve(dense, x), 1e-8)
    close(matrix.slogdet()[1], torch.linalg.slogdet(dense)[1])


@pytest.mark.parametrize("block", [1, 4, 32])
def test_a_singular_matrix_is_refused(block: int) -> None:
    # the path graph's Laplacian: its rows add up to zero
    ones = torch.ones(40, dtype=REAL)
    diagonal = 2 * ones
    diagonal[0] = diagonal[-1] = 1
    none = torch.zeros(40, 0, dtype=REAL)
    matrix = TridiagonalLowRank(diagonal, -ones[1:], -ones[1:], none, none).as_sss(block)
    for refused in (lambda: matrix.solve(ones), matrix.inverse_diagonal):
        with pytest.raises(
            SingularMatrix, match=r"the matrix is singular, or too near to it: elimination at .*damp it"
        ):
            refused()
    sign, logarithm = matrix.slogdet()
    assert (float(sign), float(logarithm)) == (0, -float("inf"))


@pytest.mark.parametrize("power", [-600, 600])
def test_a_matrix_far_from_one_keeps_its_digits(power: int) -> None:
    matrix, dense = sss(61, 7, 3, REAL)
    scale = 2.0**power
    scaled = BlockSSS(
        61,
        **{name: tensor * scale if name in "DUP" else tensor for name, tensor in matrix.tensors().items()},
        orders=matrix.orders,
    )
    x = Draw(9, REAL)(61)
    close(scaled.solve(x) * scale, torch.linalg.solve(dense, x))
    close(scaled.slogdet()[1], torch.linalg.slogdet(dense)[1] + 61 * power * torch.log(torch.tensor(2.0, dtype=REAL)))


def require_verbs(matrix: SemiseparableMatrix, dense: Tensor, scale: float, most: float) -> None:
    """Solves, determinants and the inverse's diagonal of scale · dense, as those of dense have them in float64."""
    size = matrix.size
    x = Draw(9, REAL)(size, 2)
    wanted = torch.linalg.solve(dense, x)
    assert float((matrix.solve(x.to(matrix.dtype)).to(REAL) * scale - wanted).norm()) <= most * float(wanted.norm())
    damped = torch.linalg.solve(dense + torch.eye(size) / 2, x)
    found = matrix.solve(x.to(matrix.dtype), scale / 2).to(REAL) * scale
    assert float((found - damped).norm()) <= most * float(damped.norm())
    shifts = torch.tensor([0.0, 0.5], dtype=REAL)
    determinants = [torch.linalg.slogdet(dense + shift * torch.eye(size)) for shift in shifts]
    sign, logarithm = matrix.slogdet()
    logarithms = matrix.logdets(shifts * scale)
    for got, (wanted_sign, value) in zip((logarithm, *logarithms[1:]), determinants, strict=True):
        assert float(sign) == float(wanted_sign)
        assert float(got) == pytest.approx(float(value) + size * math.log(scale), rel=most, abs=most * size)
    diagonal = torch.linalg.inv(dense).diagonal()
    missed = matrix.inverse_diagonal().to(REAL) * scale - diagonal
    assert float(missed.abs().max()) <= most * float(diagonal.abs().max())


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("size", [1, 20, 64, 131])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, s) for s in (1e-36, 1e-22, 1e-10, 1e20, 1e36)] + [(REAL, s) for s in (1e-300, 1e-28, 1e28, 1e300)],
)
def test_tridiagonal_plus_low_rank_is_regular_at_every_scale(size: int, dtype: torch.dtype, scale: float) -> None:
    fitted = fit_tridiagonal_low_rank((covariance(size) * scale).to(dtype)).matrix
    for matrix in (fitted, fitted.as_sss(), *([fitted.rounded(torch.float16)] if dtype == torch.float32 else [])):
        require_verbs(matrix, matrix.to_dense().to(REAL) / scale, scale, 1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("scale", [1e-12, 1e-30, 1e30])
def test_a_column_of_zeros_sets_no_scale(scale: float) -> None:
    # U has a column of ones, and V of zeros
    sign, logarithm = fit_tridiagonal_low_rank(torch.eye(2) * scale, 1).matrix.slogdet()
    assert float(sign) == 1
    assert float(logarithm) == pytest.approx(2 * math.log(scale), rel=1e-6)


@pytest.mark.parametrize("kind", ["rows", "rows and columns"])
def test_rows_of_many_sizes_are_no_singular_matrix(kind: str) -> None:
    matrix, _ = tridiagonal(64, 4, REAL)
    left = torch.logspace(0, -8, 64, dtype=REAL)
    right = left if kind == "rows and columns" else torch.ones_like(left)
    graded = TridiagonalLowRank(
        matrix.diagonal * left * right,
        matrix.lower * left[1:] * right[:-1],
        matrix.upper * left[:-1] * right[1:],
        matrix.U * left[:, None],
        matrix.V * right[:, None],
    ).to(dtype=torch.float32)
    dense = graded.to_dense().to(REAL)
    x = left.to(torch.float32)
    wanted = torch.linalg.solve(dense, x.to(REAL))
    assert float((graded.solve(x).to(REAL) * right - wanted * right).abs().max()) <= 1e-5 * float(
        (wanted * right).abs().max()
    )
    assert float(graded.slogdet()[1]) == pytest.approx(float(torch.linalg.slogdet(dense)[1]), rel=1e-6)
    inverse = torch.linalg.inv(dense).diagonal()
    assert float((graded.inverse_diagonal().to(REAL) / inverse - 1).abs().max()) <= 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_singular_matrix_is_refused_at_every_scale(scale: float) -> None:
    ones = torch.full((40,), scale)
    diagonal = 2 * ones
    diagonal[0] = diagonal[-1] = scale
    matrix = TridiagonalLowRank(diagonal, -ones[1:], -ones[1:], torch.zeros(40, 0), torch.zeros(40, 0))
    with pytest.raises(SingularMatrix, match="the matrix is singular, or too near to it"):
        matrix.solve(ones)
    assert float(matrix.slogdet()[1]) == -torch.inf


def test_an_order_is_bounded_by_its_generators() -> None:
    matrix, _ = sss(30, 7, 3, REAL)
    with pytest.raises(MatrixRefused, match="5 blocks have 4 orders from 0 to"):
        BlockSSS(30, **matrix.tensors(), orders=((9, 9, 9, 9), matrix.orders[1]))
    with pytest.raises(WrongShape, match="generator `W` must have shape"):
        BlockSSS(30, **(matrix.tensors() | {"W": matrix.W[:, :1]}))
    with pytest.raises(WrongShape, match="50 rows in blocks of 7 are 8 blocks"):
        BlockSSS(50, **matrix.tensors())
    with pytest.raises(MatrixRefused, match="needs the tensors P, Q"):
        BlockSSS.read({name: tensor for name, tensor in matrix.tensors().items() if name not in "PQ"}, {"size": 30})


def test_neighbours_must_agree_about_an_edge() -> None:
    draw = Draw(0, REAL)
    edge = {"U": (2, 1), "W": (2, 2), "V": (2, 2), "P": (2, 0), "R": (0, 0), "Q": (2, 0)}
    generators = {name: [draw(*shape), draw(*shape)] for name, shape in edge.items()} | {"D": [draw(2, 2), draw(2, 2)]}
    with pytest.raises(
        WrongShape, match="blocks 0 and 1 disagree about the edge between them: U has 1 columns and V 2"
    ):
        BlockSSS.from_blocks(generators)


def test_a_vector_of_another_length_is_refused() -> None:
    for matrix in (tridiagonal(61, 3, REAL)[0], sss(61, 7, 3, REAL)[0]):
        for call in (matrix.matvec, matrix.rmatvec, matrix.solve):
            with pytest.raises(WrongShape, match=r"must have shape \(61,\) or \(61, k\) \(got \(60,\)\)"):
                call(torch.zeros(60, dtype=REAL))


@pytest.mark.parametrize(
    "z",
    ["a", None, True, torch.nan, torch.inf, complex(0, torch.nan), 10**400, torch.zeros(3), torch.tensor(torch.nan)],
)
def test_a_shift_is_a_finite_number(z: Any) -> None:
    for matrix in (tridiagonal(61, 3, REAL)[0], sss(61, 7, 3, REAL)[0]):
        with pytest.raises(MatrixRefused, match="`z` must be a "):
            matrix.shifted(z)
        with pytest.raises(MatrixRefused, match="`damping` must be a "):
            matrix.solve(torch.ones(61), z)


@pytest.mark.parametrize("z", [2, np.float32(2), np.complex64(2), 2 + 0j, torch.tensor(2.0), torch.tensor([2.0])])
def test_a_shift_is_of_any_type_of_number(z: Any) -> None:
    for matrix, dense in (tridiagonal(61, 3, REAL), sss(61, 7, 3, REAL)):
        shifted = matrix.shifted(z)
        assert shifted.dtype == (torch.complex128 if isinstance(z, (np.complex64, complex)) else REAL)
        close(shifted.to_dense(), (dense - 2 * torch.eye(61, dtype=REAL)).to(shifted.dtype))


def test_a_matrix_moves_to_what_there_is() -> None:
    for kind in (tridiagonal, sss_of_four):
        real, whole = kind(20, 3, REAL)[0], kind(20, 3, torch.complex128)[0]
        for device in ("foo", 1.5, "cuda:99"):
            with pytest.raises(MatrixRefused, match="`device` must be one that this machine's PyTorch has"):
                real.to(device)  # type: ignore[arg-type]
        for dtype in (torch.int32, torch.float16, "float32"):
            with pytest.raises(MatrixRefused, match=r"must be one of torch\.float32, torch\.float64, torch\.complex64"):
                real.to(dtype=dtype)  # type: ignore[arg-type]
        with pytest.raises(
            MatrixRefused, match=r"must be one of torch\.complex64, torch\.complex128 \(got torch\.float64"
        ):
            whole.to(dtype=REAL)
        assert real.to("cpu", torch.complex64).dtype == whole.to(dtype=torch.complex64).dtype == torch.complex64


def test_a_complex_matrix_keeps_its_precision() -> None:
    with pytest.raises(MatrixRefused, match=r"must be real \(got torch\.complex128\)"):
        tridiagonal(20, 3, torch.complex128)[0].rounded(torch.float16)


def test_ranks_of_levels_are_no_less_than_0() -> None:
    tensors = tridiagonal(20, 6, REAL)[0].tensors()
    for ranks in ([7, -1], [6.0], [True, 5]):
        with pytest.raises(MatrixRefused, match="`ranks` must be "):
            TridiagonalLowRank.read(tensors, {"ranks": ranks})


@pytest.mark.parametrize("block", [0, -3])
def test_a_block_has_a_row(block: int) -> None:
    matrix, _ = tridiagonal(20, 3, REAL)
    with pytest.raises(MatrixRefused, match=rf"`block` must be at least 1 \(got {block}\)"):
        matrix.as_sss(block)
    with pytest.raises(MatrixRefused, match=r"`block` must be a whole number \(got 4\.0\)"):
        matrix.as_sss(4.0)  # type: ignore[arg-type]


def test_a_vector_is_a_tensor() -> None:
    matrix, _ = tridiagonal(3, 1, REAL)
    with pytest.raises(MatrixRefused, match=r"`x` must be a torch\.Tensor \(got list\)"):
        matrix.matvec([1.0, 2.0, 3.0])  # type: ignore[arg-type]


def test_a_matrix_is_looked_at_before_it_is_compressed() -> None:
    with pytest.raises(WrongShape, match=r"square, of shape \(N, N\) \(got \(3, 4\)\)"):
        require_matrix(torch.zeros(3, 4))
    with pytest.raises(MatrixRefused, match="must have a row"):
        require_matrix(torch.zeros(0, 0))
    broken = torch.zeros(600, 600)
    broken[333, 5] = torch.nan
    with pytest.raises(NonFiniteFactor, match="NaN or Inf in row 333"):
        require_matrix(broken)
    with pytest.warns(UserWarning, match=r"of torch.float16 and is computed with in torch.float32"):
        assert require_matrix(torch.eye(3, dtype=torch.float16)).dtype == torch.float32
    with pytest.warns(UserWarning, match=r"of torch.int64 and is computed with in torch.float64"):
        assert require_matrix(torch.eye(3, dtype=torch.int64)).dtype == torch.float64


@pytest.mark.parametrize("lowrank", [torch.float16, torch.bfloat16])
def test_columns_in_16_bits_keep_their_digits(lowrank: torch.dtype) -> None:
    matrix, _ = tridiagonal(200, 6, REAL)
    # columns that float16 alone would lose, or could not hold
    sizes = torch.tensor([1e-12, 1e-7, 1.0, 1e3, 1e7, 0.0], dtype=REAL)
    wild = TridiagonalLowRank(matrix.diagonal, matrix.lower, matrix.upper, matrix.U * sizes, matrix.V)
    narrow = wild.rounded(lowrank)
    assert narrow.U.dtype == narrow.V.dtype == lowrank
    assert narrow.dtype == torch.float32
    step = 2.0**-11 if lowrank == torch.float16 else 2.0**-8
    most = (wild.U.abs() @ wild.V.abs().T) * 2 * step * 1.01 + 1e-6 * wild.diagonal.abs().max()
    assert bool(((narrow.to_dense() - wild.to_dense()).abs() <= most).all())
    for column in range(5):
        found, wanted = narrow.columns()[0][:, column], wild.U[:, column]
        assert float((found - wanted).norm() / wanted.norm()) <= step


@pytest.mark.parametrize("lowrank", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("levels", [1, 3])
def test_the_report_by_formula_is_that_of_the_tensors(lowrank: torch.dtype, levels: int) -> None:
    ranks = level_ranks(300, levels)
    matrix = tridiagonal(300, sum(ranks), torch.float32)[0]
    matrix = TridiagonalLowRank(
        *(matrix.tensors()[name] for name in ("diagonal", "lower", "upper", "U", "V")), ranks=ranks
    )
    held = matrix if lowrank == torch.float32 else matrix.rounded(lowrank)
    report = held.memory_usage()
    assert report == formula_bytes(300, ranks, lowrank)
    tensors = held.tensors()
    assert report["tridiagonal_bytes"] == sum(tensors[name].nbytes for name in ("diagonal", "lower", "upper"))
    assert report["lowrank_bytes"] == tensors["U"].nbytes + tensors["V"].nbytes
    assert report["memory_reduction_vs_dense"] == 1 - report["total_bytes"] / (4 * 300**2)
    assert report["ranks_per_level"] == list(ranks)


def test_levels_have_the_rank_of_the_logarithm_before() -> None:
    assert level_ranks(2048, 3) == (11, 4, 2)
    assert level_ranks(2048, 6) == (11, 4, 2, 1, 1, 1)
    assert level_ranks(1, 1) == (1,)
