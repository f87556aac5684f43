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

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.linalg.lanczos import PANEL_BYTES, orthogonalise
from engine.operators.krylov.search_options import gaussian, received
from engine.operators.krylov.spectral_bands import Quadrature, gauss

__all__ = ["LanczosQuadrature", "Quadrature", "QuadratureOptions", "quadrature_bytes"]

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


def quadrature_bytes(size: int, options: QuadratureOptions) -> int:
    """Return the bytes that a quadrature holds at its peak, beside the products of its caller."""
    bases = options.probes * options.steps * size * options.dtype.itemsize
    return bases + 3 * options.probes * size * 8 + 3 * PANEL_BYTES


class LanczosQuadrature:
    """Lanczos from several probes, whose caller multiplies ``vectors`` and hands the products to ``advance``.

    Args:
        size: n, the order of the matrix.
        options: Probes and steps.
        device: Where the bases are kept.

    Raises:
        ValueError: If an option is out of its range.

    Memory:
        ``quadrature_bytes(size, options)``: probes · steps vectors, and three of each probe in float64.
    """

    def __init__(self, size: int, options: QuadratureOptions, device: torch.device | str = "cpu") -> None:
        _require(size, options)
        self.size, self.options = size, options
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
    def vectors(self) -> Tensor:
        """Vectors to be multiplied next, shape (n, probes), a view; one whose space is exhausted is zero."""
        return self._rows[:, min(self._step, self.options.steps - 1)].mT

    @property
    def done(self) -> bool:
        """Whether all steps are made."""
        return self._step == self.options.steps

    @property
    def products(self) -> int:
        """Products handed in so far, one for each vector."""
        return self._step * self.options.probes

    def advance(self, products: Tensor) -> None:
        """Take in the products of ``vectors``.

        Args:
            products: ``F vectors``, shape (n, probes), any float dtype; left as it is.

        Raises:
            WrongShape: If the shape is not that of ``vectors``.
            NonFiniteFactor: If a number is NaN or infinite.
            ValueError: If all steps are made.
        """
        if self.done:
            raise ValueError("the quadrature is done and takes no products; read `result()`")
        block, step = received(products, self.vectors), self._step
        known = self._rows[:, : step + 1]
        coefficients = orthogonalise(known, block[:, None]).cpu()
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

    def state(self) -> dict[str, Tensor]:
        """Return all that is needed to go on, as views that the next ``advance`` changes: save them first.

        Returns:
            The used part of the bases, on their device, and numbers on the host.
        """
        used = min(self._step + 1, self.options.steps)
        return {
            "rows": self._rows[:, :used],
            "diagonal": self._diagonal,
            "beside": self._beside,
            "numbers": torch.tensor([*self._identity, self._step], dtype=torch.int64),
        }

    @property
    def _identity(self) -> list[int]:
        options = self.options
        return [self.size, options.probes, options.steps, options.seed % 2**63, options.dtype.itemsize]

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a state, as if this object had made the products itself.

        Args:
            state: What ``state`` gave, of a quadrature of the same size and options.

        Raises:
            ValueError: If the state is another quadrature's.
        """
        *identity, step = state["numbers"].tolist()
        if identity != self._identity:
            raise ValueError(
                f"the state must be of this quadrature, {self._identity} (got {identity}: size, probes, steps, seed, "
                "bytes of a number); begin anew, or restore the options that it was saved with"
            )
        self._rows[:, : state["rows"].shape[1]].copy_(state["rows"])
        self._diagonal.copy_(state["diagonal"])
        self._beside.copy_(state["beside"])
        self._step = step


def _require(size: int, options: QuadratureOptions) -> None:
    """Raise ValueError for what cannot be sampled."""
    if size < 1:
        raise ValueError(f"the matrix must have at least one row (got {size})")
    if options.probes < 2:
        raise ValueError(f"probes must be at least 2, since one shows no deviation (got {options.probes})")
    if options.steps < 1:
        raise ValueError(f"steps must be at least 1 (got {options.steps})")
    if options.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64 (got {options.dtype})")
