"""Stochastic Lanczos quadrature: a symmetric matrix's spectrum as a distribution, from products with random vectors.

A probe v, uniform on the unit sphere, has the spectral measure ``μ_v = Σ (vᵀu_i)² δ(λ_i)``, whose mean is the spectral
distribution ``Σ δ(λ_i)/n``. s steps of Lanczos from v give the tridiagonal T, whose eigenvalues θ_k and squared first
components ω_k of its eigenvectors are Gauss's quadrature of μ_v: exact for polynomials up to degree 2 s − 1. All probes
advance together, each with a basis of its own, fully reorthogonalised.

``krylov.spectral_bands`` turns the quadrature into estimates with 95 % bands. The sphere is taken, not signs, since
there ``vᵀPv`` of a spectral projector P is Beta distributed whatever the eigenvectors are, so that its variance is
known.

References:
    Golub & Meurant (2010), Matrices, moments and quadrature with applications
    Ubaru, Chen & Saad (2017), Fast estimation of tr(f(A)) via stochastic Lanczos quadrature
    Chen, Trogdon & Ubaru (2021), Analysis of stochastic Lanczos quadrature for spectrum approximation
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from engine.linalg.lanczos import orthogonalise
from engine.operators.krylov.iteration import Iteration
from engine.operators.krylov.search_options import gaussian
from engine.operators.krylov.spectral_bands import Quadrature, gauss

__all__ = ["LanczosQuadrature", "Quadrature", "QuadratureOptions"]

_FIRST_DRAW = 2**32
"""Other draws than those of a search with the same seed."""


@dataclass(frozen=True, kw_only=True)
class QuadratureOptions:
    """How well the spectrum is sampled."""

    probes: int
    """Random vectors, two or more: the sampling error falls with the root of their number times n."""
    steps: int
    """Products of each: the resolution is that of polynomials of twice that degree."""
    seed: int
    dtype: torch.dtype
    """Precision of the vectors, float32 or float64; coefficients are float64."""


class LanczosQuadrature(Iteration):
    """Lanczos from several probes.

    Args:
        size: n, the order of the matrix.
        options: Probes and steps.
        device: Where the bases are kept.

    Raises:
        ValueError: If an option is out of its range.

    Memory:
        At its peak, beside the products of its caller: probes · steps vectors, three of each probe in float64, and
        three panels.
    """

    named = "quadrature"

    def __init__(self, size: int, options: QuadratureOptions, device: torch.device | str = "cpu") -> None:
        super().__init__(size, options.dtype)
        if options.probes < 2:
            raise ValueError(f"probes must be at least 2, since one shows no deviation (got {options.probes})")
        if options.steps < 1:
            raise ValueError(f"steps must be at least 1 (got {options.steps})")
        self.options = options
        probes, steps = options.probes, options.steps
        self._rows = torch.empty(probes, steps, size, dtype=options.dtype, device=device)
        self._diagonal = torch.zeros(probes, steps, dtype=torch.float64)
        self._beside = torch.zeros(probes, steps, dtype=torch.float64)
        self._step = 0
        for probe in range(probes):
            vector = gaussian(
                options.seed, range(_FIRST_DRAW + probe, _FIRST_DRAW + probe + 1), size, self._rows.device
            )
            self._rows[probe, 0] = (vector[0] / vector.norm()).to(options.dtype)

    @property
    @override
    def vectors(self) -> Tensor:
        return self._rows[:, min(self._step, self.options.steps - 1)].mT

    @property
    @override
    def done(self) -> bool:
        return self._step == self.options.steps

    @property
    @override
    def products(self) -> int:
        return self._step * self.options.probes

    @override
    def _advance(self, block: Tensor) -> None:
        step = self._step
        coefficients = orthogonalise(self._rows[:, : step + 1], block[:, None]).cpu()
        self._diagonal[:, step] = coefficients[:, step, 0]
        left = block.norm(dim=1)
        beside = left.cpu()
        # rounding leaves something of a vector that lies in the basis; there the probe's measure is known exactly
        eps = torch.finfo(self.options.dtype).eps
        scale = torch.maximum(self._diagonal.abs().amax(1), self._beside.amax(1))
        beside[(beside <= 8 * eps * scale) | (step + 1 >= self.size)] = 0
        self._beside[:, step] = beside
        self._step = step + 1
        if not self.done:
            inverse = torch.where(beside > 0, 1 / beside, 0.0).to(block.device)
            block *= inverse[:, None]
            self._rows[:, self._step] = block.to(self._rows.dtype)

    def result(self) -> Quadrature:
        """Return the quadrature of the steps made so far.

        Returns:
            Nodes and weights, (probes, steps) each, and what the bands need.

        Raises:
            ValueError: If no product was handed in.
        """
        if self._step == 0:
            raise ValueError("a quadrature needs one product of each probe at least; hand in those of `vectors`")
        diagonal, beside = self._diagonal[:, : self._step].clone(), self._beside[:, : self._step].clone()
        nodes, weights = gauss(diagonal, beside)
        return Quadrature(
            size=self.size,
            nodes=nodes,
            weights=weights,
            diagonal=diagonal,
            beside=beside,
            precision=torch.finfo(self.options.dtype).eps,
        )

    @override
    def _tensors(self) -> dict[str, Tensor]:
        used = min(self._step + 1, self.options.steps)
        return {"rows": self._rows[:, :used], "diagonal": self._diagonal, "beside": self._beside}

    @property
    @override
    def _numbers(self) -> tuple[list[int], list[int]]:
        options = self.options
        own = [self.size, options.probes, options.steps, options.seed % 2**63, options.dtype.itemsize]
        return own, [self._step]

    @override
    def _go_on(self, state: Mapping[str, Tensor], counts: list[int]) -> None:
        self._rows[:, : state["rows"].shape[1]].copy_(state["rows"])
        self._diagonal.copy_(state["diagonal"])
        self._beside.copy_(state["beside"])
        (self._step,) = counts
