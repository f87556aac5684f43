"""The diagonal of a resolvent, and a determinant by two routes, in O(N) numbers.

    python examples/resolvent.py [--points 32768]

H = H₀ + diag(v), H₀ the discrete Laplacian. `bk_core(v, z)` is diag (H − z)⁻¹. The Birman–Schwinger operator
K(z) = |v|^½ (H₀ − z)⁻¹ v^½, with v^½ = sign(v) |v|^½, has order 1 as (H₀ − z)⁻¹ has, and

    det(I + K(z)) = det(H − z) / det(H₀ − z).

References:
    Simon (2005), Trace ideals and their applications, chapter 5
"""

import argparse
import time

import torch
from torch import Tensor

from engine.semiseparable.construct_sss import construct_sss
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank
from kronoscope.semiseparable import BirmanSchwingerCore

POINTS = 400


def laplacian(size: int) -> TridiagonalLowRank:
    """Return H₀, 2 on the diagonal and −1 beside it."""
    beside, none = torch.full((size - 1,), -1.0, dtype=torch.float64), torch.zeros(size, 0, dtype=torch.float64)
    return TridiagonalLowRank(torch.full((size,), 2.0, dtype=torch.float64), beside, beside, none, none)


def well(size: int) -> Tensor:
    """Return a Gaussian well with a bump beside it."""
    x = torch.linspace(-8, 8, size, dtype=torch.float64)
    return 0.5 * torch.exp(-((x - 3) ** 2)) - 1.5 * torch.exp(-(x**2))


def determinants(v: Tensor, z: complex) -> tuple[complex, complex]:
    """Return det(I + K(z)), of K as a block SSS matrix, and det(H − z) / det(H₀ − z)."""
    free = laplacian(len(v))
    resolvent = free.shifted(z).solve(torch.eye(len(v), dtype=torch.complex128))
    operator = v.abs().sqrt()[:, None] * resolvent * (v.sign() * v.abs().sqrt())
    compressed = construct_sss(operator, block=32, tolerance=1e-13)
    print(f"  orders of K(z): {max(compressed.orders[0])} above the diagonal, {max(compressed.orders[1])} below")
    sign, logarithm = compressed.shifted(-1).slogdet()
    whole = TridiagonalLowRank(free.diagonal + v, free.lower, free.upper, free.U, free.V).shifted(z).slogdet()
    without = free.shifted(z).slogdet()
    ratio = whole[0] / without[0] * torch.exp(whole[1] - without[1])
    return complex(sign * torch.exp(logarithm)), complex(ratio)


def main() -> None:
    """Compare with dense matrices, then take many points."""
    parser = argparse.ArgumentParser(description="The diagonal of a resolvent in O(N) numbers.")
    parser.add_argument(
        "--points", type=int, default=32_768, help="points of the last grid, which no dense matrix takes"
    )
    many = parser.parse_args().points
    core, v = BirmanSchwingerCore(POINTS), well(POINTS)
    dense = BirmanSchwingerCore(POINTS, use_semiseparable=False)
    for z in (0.3 + 0.1j, 0.3 + 1e-4j):
        found, wanted = core(v, z), dense(v, z)
        error = float((found - wanted).abs().max() / wanted.abs().max())
        print(f"z = {z}: diag (H − z)⁻¹ equals that of the dense matrix to {error:.1e}")
        by_operator, by_ratio = determinants(v, z)
        off = abs(by_operator - by_ratio) / abs(by_ratio)
        print(f"  det(I + K) = {by_operator:.10g}, det(H − z)/det(H₀ − z) = {by_ratio:.10g}: equal to {off:.1e}")
        if max(error, off) > 1e-9:
            raise SystemExit("the two differ by more than 1e-9")
    begun = time.perf_counter()
    BirmanSchwingerCore(many)(well(many), 0.3 + 1e-2j)
    print(
        f"N = {many:,}: {time.perf_counter() - begun:.1f} s; a dense matrix would take {16 * many**2 / 2**30:.3g} GiB"
    )


if __name__ == "__main__":
    main()
