"""Precision errors: the factors of one job by `precision: ieee` and by `precision: tf32`, each against float64.

Of all layers the relative errors of A and of G, by Frobenius norm. Of the last few, which are as large as any: the
largest angle between the spans of their ten leading eigenvectors, and the relative error of a damped solve
``(G + λ_G I)⁻¹ R (A + λ_A I)⁻¹`` for one random R, with λ_A and λ_G of the default relative damping.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.device_jobs import Figures, timed
from benchmarks.cases.device_models import DEVICE, Case
from catalog.requests.collection import Stabilisation

LEADING = 10
DECOMPOSED = 4
"""Layers whose eigenvectors and solves are compared: a block of a language model, in the order of their names."""


def precision_errors(case: Case) -> Figures:
    """Return the errors of each precision: the median and the most over the layers."""
    truth = _factors(case, dtype="float64")
    decomposed = list(truth)[-DECOMPOSED:]
    exact = {name: [_leading(side) for side in truth[name]] for name in decomposed}
    errors: Figures = {}
    for precision in ("ieee", "tf32"):
        found = _factors(case, precision=precision)
        rows = {
            side: [_relative(found[name][place], truth[name][place]) for name in truth]
            for place, side in enumerate("AG")
        }
        for place, side in enumerate("AG"):
            own = [_angle(_leading(found[name][place]), exact[name][place]) for name in decomposed]
            rows[f"angle of {LEADING} leading eigenvectors of {side}"] = own
        rows["damped solve"] = [_solve_error(found[name], truth[name]) for name in decomposed]
        errors[precision] = {name: _spread(values) for name, values in rows.items()}
    return errors


def _factors(case: Case, **options: Any) -> dict[str, tuple[Tensor, Tensor]]:  # noqa: ANN401 - of a document
    """A and G of each layer, in float64 on the host."""
    factors = timed(case, "off", **options)[1].factors
    return {name: (factors[name].A.double(), factors[name].G.double()) for name in case.layers}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": sorted(values)[len(values) // 2], "most": max(values)}


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def _leading(matrix: Tensor) -> Tensor:  # (n, n) -> (n, 10)
    return torch.linalg.eigh(matrix.to(DEVICE))[1][:, -LEADING:]


def _angle(found: Tensor, exact: Tensor) -> float:
    """The largest principal angle between two spans of orthonormal columns, in radians."""
    outside = found - exact @ (exact.mT @ found)
    return math.asin(min(1.0, float(torch.linalg.matrix_norm(outside, 2))))


def _solve_error(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> float:
    # λ_A and λ_G as `pi` splits a relative λ: each a multiple of its own side's mean eigenvalue
    share = math.sqrt(Stabilisation().damping)
    added = [share * float(side.diagonal().mean()) for side in exact]
    torch.manual_seed(0)
    right = torch.randn(len(exact[1]), len(exact[0]), dtype=torch.float64, device=DEVICE)
    return _relative(_solved(found, added, right), _solved(exact, added, right))


def _solved(sides: tuple[Tensor, Tensor], added: Sequence[float], right: Tensor) -> Tensor:
    roots = []
    for side, shift in zip(sides, added, strict=True):
        damped = side.to(DEVICE)
        roots.append(torch.linalg.cholesky(damped + shift * torch.eye(len(damped), dtype=damped.dtype, device=DEVICE)))
    a, g = roots
    return torch.cholesky_solve(torch.cholesky_solve(right, g).mT, a).mT
