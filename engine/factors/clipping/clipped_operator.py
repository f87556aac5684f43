"""A clipped side as an operator: functions of S that have a corner at the floor, applied by solves with S alone.

With ``φ(x) = 1/(x + λ)``, whose pole lies below the floor f, and the sign of x − f,

    ``max(x, f) = (f + x)/2 + (x − f) sign(x − f)/2``
    ``1/(max(x, f) + λ) = φ(f) + (φ(x) − φ(f)) (1 + sign(x − f))/2``

For the sign stands Zolotarev's approximant r, the best rational one of its degree for ``ε ≤ |x − f| ≤ M``. It has
partial fractions ``r(x) = Σ_j a_j/(x − z_j)`` with poles ``z_j = f ± i s_j`` on a vertical line through the floor, and
φ is multiplied in pole by pole: ``Σ_j a_j φ(z_j)/(x − z_j) = φ(x) (r(x) − r(−λ))``, with ``r(−λ) = −1``. So

    ``max(S, f) = (f + S)/2 + (S − f) r(S)/2``
    ``(max(S, f) + λ)⁻¹ = φ(f)/2 + ½ Σ_j a_j (φ(z_j) − φ(f)) (S − z_j)⁻¹``

Neither is singular where S is. Each pole takes one solve with a complex diagonal plus or minus a matrix of low rank, by
its capacitance ``I ± B (diag c − z)⁻¹ Bᵀ`` (r, r): nothing of the size n² is ever made. What becomes of an eigenvalue
within ε of the floor lies between the two branches, which meet there; ``ε = 1e-9 f`` moves it by 1e-9 of the floor.

The coefficients follow from Jacobi's elliptic functions of modulus ``√(1 − ε²/M²)``; the number of poles grows with
``log(1/error) · log(M/ε)``, to about a hundred for κ_max = 1e6.

References:
    Zolotarev (1877), Applications of elliptic functions to problems of functions deviating least from zero
    Hale, Higham & Trefethen (2008), Computing A^α, log(A), and related matrix functions by contour integrals
    van den Eshof et al. (2002), Numerical methods for the QCD overlap operator I: sign function of a Hermitian matrix
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from engine.linalg.eigenbasis import ClippedSide
from engine.linalg.linear_operator import Operator
from engine.linalg.spectrum_counts import DiagonalUpdate

_CORNER = 1e-9
"""Share of the floor: eigenvalues that are nearer to it are not distinguished from it."""
_ERROR = 1e-13
"""Error of the approximant of the sign."""
_KEPT_BYTES = 256 * 2**20
"""Most bytes of the factorisations of all poles that are kept for the next call."""
_POLES_ABOUT = 120


@dataclass(frozen=True, kw_only=True)
class SignPoles:
    """The upper half of the poles of ``r(x) = Σ a/(x − i s)``, which is near the sign of x for ``ε ≤ |x| ≤ M``."""

    heights: Tensor
    """s (J,) > 0."""
    residues: Tensor
    """a (J,) > 0, the same of a pole and of its conjugate."""

    @classmethod
    def of(cls, near: float, far: float) -> "SignPoles":
        """Return Zolotarev's approximant of the sign."""
        ratio = near / far
        # K(k') ≈ log(4/k) and the error 4 q^{2J} with the nome q = exp(−π K(k)/K(k'))
        pairs = math.ceil(math.log(4 / _ERROR) * math.log(4 / ratio) / math.pi**2) + 1
        period = _complete_integral(ratio)
        places = torch.arange(1, 2 * pairs, dtype=torch.float64) * (period / (2 * pairs))
        near_end = places <= period / 2
        tangents = _tangents(torch.where(near_end, places, period - places), ratio)
        # tan(K − u) = 1/(k' tan u): the phase itself has no digits left where it comes near π/2
        squares = torch.where(near_end, ratio * tangents, 1 / tangents).square()
        # x Π(x² + c_2l)/Π(x² + c_{2l−1}) on [ratio, 1], c = ratio² tan²: poles and zeros alternate
        poles, zeros = squares[::2], squares[1::2]
        logs = torch.stack(
            [(zeros - pole).abs().log().sum() - (poles[poles != pole] - pole).abs().log().sum() for pole in poles]
        )
        residues = logs.exp()
        # the largest and the smallest value on [ratio, 1] shall lie evenly about one
        grid = torch.logspace(math.log10(ratio), 0, 4001, dtype=torch.float64)
        values = (grid[:, None] * residues / (grid[:, None].square() + poles)).sum(1)
        scale = 2 / float(values.max() + values.min())
        # x/(x² + s²) is half the sum of 1/(x − is) and 1/(x + is)
        return cls(heights=poles.sqrt() * far, residues=residues * (scale * far / 2))

    def sign(self, x: Tensor) -> Tensor:
        """Return r at real numbers.

        Args:
            x: Any shape, float64.

        Returns:
            The same shape, near −1 or 1 for ``ε ≤ |x| ≤ M``.
        """
        wide = x[..., None]
        return (2 * self.residues * wide / (wide.square() + self.heights.square())).sum(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClippedOperator(ClippedSide):
    """``max(S, f)`` of a side that is never made dense, through solves with it.

    Memory:
        What the side holds, and its capacitances where they take no more than 256 MiB together.
    """

    side: Operator
    """S, with rows in whatever precision."""
    floor: float
    """f."""
    largest: float
    """The largest eigenvalue of S."""

    @override
    @property
    def size(self) -> int:
        return self.side.size

    @override
    def apply(self, right: Tensor) -> Tensor:
        wide = right.to("cpu", torch.float64)
        if self.floor <= 0:
            return self.side.apply(wide).to(right.device, right.dtype)
        poles = self._poles(self.largest)
        signed = self._resolved(wide, poles, poles.residues.to(torch.complex128))
        both = self.side.apply(torch.cat([wide, signed], 1)).to("cpu")
        through, again = both.chunk(2, 1)
        found = (self.floor * (wide - signed) + through + again) / 2
        return found.to(right.device, right.dtype)

    @override
    def solve(self, right: Tensor, damping: float = 0.0) -> Tensor:
        wide = right.to("cpu", torch.float64)
        if self.floor <= 0:
            return self.side.solve(wide, damping).to(right.device, right.dtype)
        poles, below = self._poles(max(self.largest, self.floor + damping)), self.floor + damping
        # φ(z) − φ(f) = −(z − f) / ((z + λ)(f + λ)), which loses nothing where z comes near f
        heights = 1j * poles.heights
        found = self._resolved(wide, poles, -poles.residues * heights / ((heights + below) * below))
        return ((wide / below + found) / 2).to(right.device, right.dtype)

    @override
    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return self.side.tensors()

    @override
    def entry(self) -> dict[str, Any]:
        return {
            "kind": "operator",
            "representation": self.side.kind,
            "metadata": self.side.metadata(),
            "floor": self.floor,
            "largest": self.largest,
            "scale": 1.0,
        }

    def _poles(self, far: float) -> SignPoles:
        if far not in self._known:
            self._known[far] = SignPoles.of(_CORNER * self.floor, 1.01 * far)
        return self._known[far]

    @cached_property
    def _known(self) -> dict[float, SignPoles]:
        return {}

    @cached_property
    def _factors(self) -> dict[float, tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def _matrix(self) -> DiagonalUpdate:
        found = self.side.update()
        if found is None:
            raise ValueError(f"a side kept as `{self.side.kind}` is no diagonal plus or minus rows")
        return found

    def _resolved(self, right: Tensor, poles: SignPoles, residues: Tensor) -> Tensor:
        """``Σ_j 2 Re(residue_j (S − z_j)⁻¹) right``."""
        total = torch.zeros_like(right)
        for height, residue in zip(poles.heights.tolist(), residues.tolist(), strict=True):
            total += 2 * (residue * self._resolvent(right, height)).real
        return total

    def _resolvent(self, right: Tensor, height: float) -> Tensor:
        """``(S − f − i height)⁻¹ right``, complex (n, k), by Woodbury's identity."""
        matrix = self._matrix
        sign = -1 if matrix.subtracts else 1
        inverse = 1 / (matrix.base.to("cpu") - complex(self.floor, height))
        solved = inverse[:, None] * right
        inner = torch.zeros(matrix.rank, right.shape[1], dtype=torch.complex128)
        for columns, part in matrix.parts():
            here = part.to("cpu")
            inner += torch.complex(here @ solved[columns].real, here @ solved[columns].imag)
        inner = torch.linalg.lu_solve(*self._factorised(height, inverse), inner)
        for columns, part in matrix.parts():
            here = part.to("cpu").T
            back = torch.complex(here @ inner.real, here @ inner.imag)
            solved[columns] -= sign * inverse[columns, None] * back
        return solved

    def _factorised(self, height: float, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """LU factors of ``I ± B (diag c − z)⁻¹ Bᵀ``."""
        if height in self._factors:
            return self._factors[height]
        matrix = self._matrix
        where = matrix.base.device
        gram = torch.complex(
            *(matrix.gram(part.contiguous().to(where)).to("cpu") for part in (inverse.real, inverse.imag))
        )
        capacitance = -gram if matrix.subtracts else gram
        capacitance.diagonal().add_(1)
        found: tuple[Tensor, Tensor] = torch.linalg.lu_factor(capacitance)
        if 16 * matrix.rank**2 * _POLES_ABOUT <= _KEPT_BYTES:
            self._factors[height] = found
        return found


def _complete_integral(ratio: float) -> float:
    """K of the modulus ``√(1 − ratio²)``, by the arithmetic-geometric mean."""
    one, other = 1.0, ratio
    while abs(one - other) > 1e-15 * one:
        one, other = (one + other) / 2, math.sqrt(one * other)
    return math.pi / (2 * one)


def _tangents(places: Tensor, ratio: float) -> Tensor:
    """``sn/cn`` of ``places``, at most half the quarter period, for the modulus ``√(1 − ratio²)``.

    By Jacobi's imaginary transformation it is ``−i sn(iu)`` of the modulus ``ratio``, which Landen's transformation
    makes smaller and smaller, down to ``−i sin(iu) = sinh u``.
    """
    moduli, wide = [ratio], places
    while moduli[-1] > 1e-17:
        modulus = moduli[-1]
        moduli.append((modulus / (1 + math.sqrt((1 - modulus) * (1 + modulus)))) ** 2)
        wide = wide / (1 + moduli[-1])
    found = wide.sinh()
    for modulus in reversed(moduli[1:]):
        found = (1 + modulus) * found / (1 - modulus * found.square())
    return found
