"""Structures of random generators, and the dense matrices that their definitions give."""

import torch
from torch import Tensor

from engine.semiseparable.block_sss import BlockSSS
from engine.semiseparable.semiseparable_matrix import SemiseparableMatrix
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank


class Draw:
    """Normal numbers, real or complex, the same in every run."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=self.dtype)

    def order(self, most: int) -> int:
        return int(torch.randint(0, most + 1, (), generator=self.generator))


def tridiagonal(size: int, rank: int, dtype: torch.dtype, seed: int = 0) -> tuple[TridiagonalLowRank, Tensor]:
    draw = Draw(seed, dtype)
    matrix = TridiagonalLowRank(
        draw(size) + 6, draw(size - 1), draw(size - 1), draw(size, rank) / 2, draw(size, rank) / 2
    )
    dense = torch.diag(matrix.diagonal) + torch.diag(matrix.lower, -1) + torch.diag(matrix.upper, 1)
    return matrix, dense + matrix.U @ matrix.V.T


def sss(size: int, block: int, most: int, dtype: torch.dtype, seed: int = 0) -> tuple[BlockSSS, Tensor]:
    """Orders are drawn from 0 to ``most``, each edge its own."""
    draw = Draw(seed, dtype)
    rows = [min(block, size - start) for start in range(0, size, block)]
    m = len(rows)
    a, b = ([0, *(draw.order(most) for _ in range(m - 1)), 0] for _ in range(2))
    g = {
        "D": [draw(k, k) + 8 * torch.eye(k) for k in rows],
        "U": [draw(rows[i], a[i + 1]) for i in range(m)],
        "W": [draw(a[i], a[i + 1]) / 3 for i in range(m)],
        "V": [draw(rows[i], a[i]) for i in range(m)],
        "P": [draw(rows[i], b[i]) for i in range(m)],
        "R": [draw(b[i + 1], b[i]) / 3 for i in range(m)],
        "Q": [draw(rows[i], b[i + 1]) for i in range(m)],
    }
    lines = []
    for i in range(m):
        line = []
        for j in range(m):
            piece = g["D"][i]
            if j > i:
                piece = g["U"][i]
                for k in range(i + 1, j):
                    piece = piece @ g["W"][k]
                piece = piece @ g["V"][j].T
            elif j < i:
                piece = g["P"][i]
                for k in range(i - 1, j, -1):
                    piece = piece @ g["R"][k]
                piece = piece @ g["Q"][j].T
            line.append(piece)
        lines.append(torch.cat(line, 1))
    return BlockSSS.from_blocks(g), torch.cat(lines)


REAL, COMPLEX = torch.float64, torch.complex128
SCALES = [(torch.float32, 1e-40), (torch.float32, 1e-22), (torch.float32, 1e19), (REAL, 1e-200), (REAL, 1e200)]
"""Scales at which squares of entries are beyond the dtype."""


def covariance(size: int = 64) -> Tensor:
    """Of normal numbers, float64, with a condition near 10."""
    X = Draw(0, REAL)(200, size)
    return X.T @ X / 200 + torch.eye(size, dtype=REAL) / 10


def true_error(matrix: SemiseparableMatrix, dense: Tensor, scale: float) -> float:
    """The relative error, of numbers near one in float64."""
    wanted = dense.to(REAL) / scale
    return float((matrix.to_dense().to(REAL) / scale - wanted).norm() / wanted.norm())


def cases() -> dict[str, tuple[SemiseparableMatrix, Tensor]]:
    """Real and complex; ragged, one block, one row, order 0, one row a block."""
    return {
        "T + UVᵀ": tridiagonal(61, 5, REAL),
        "T + UVᵀ, complex": tridiagonal(61, 5, COMPLEX),
        "T + UVᵀ, several blocks": tridiagonal(131, 3, REAL),
        "T alone": tridiagonal(67, 0, REAL),
        "T + UVᵀ, one row": tridiagonal(1, 1, REAL),
        "T + UVᵀ, two rows": tridiagonal(2, 1, REAL),
        "SSS, ragged": sss(61, 7, 3, REAL),
        "SSS, ragged, complex": sss(61, 7, 3, COMPLEX),
        "SSS, whole blocks": sss(64, 8, 4, REAL),
        "SSS, one block": sss(5, 8, 3, REAL),
        "SSS, one row": sss(1, 1, 3, REAL),
        "SSS, order 0": sss(30, 7, 0, REAL),
        "SSS, one row a block": sss(23, 1, 2, REAL),
    }
