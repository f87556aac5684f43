"""Low rank: ``G = Uᵀ U / w`` kept as its rows U (T, n), where T positions take less than n² numbers.

A row is the gradient of one position, in its storage precision, times a scale of its own: in fp16
gradients of a mean loss would be zeros, so a row is stored with its largest number between 2¹⁴ and
2¹⁵ and its scale holds the power of two (and √β per update of a moving average). Everything follows
from the T×T Gram matrix ``K = U Uᵀ / w``, made and decomposed in float64: its eigenvalues are those of G.

The gradient of the same positions is ``V = Uᵀ C / √w``, within the span of the rows; there

    (G + λI)⁻¹ V = Uᵀ (λI + K)⁻¹ C / √w

(push-through) keeps its digits, where ``(V − Uᵀ(…)⁻¹U V)/λ`` cancels all of them (``damped_gram`` says how
where rows depend on each other). Any other right-hand side is split along the eigenvectors
``Q = Uᵀ V Λ^{-1/2} / √w``: ``Q c/(λ + Λ) + (v − Q c)/λ``, projected twice.

References:
    Woodbury (1950), Inverting modified matrices
    Henderson & Searle (1981), On deriving the inverse of a sum of matrices: the push-through identity
    Parlett (1998), The symmetric eigenvalue problem, 6.9: twice is enough
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.errors import BrokenFactors, NonFiniteFactor
from engine.factors.capacitance import NOISE, Factorised, cancellation, independent_solve, robust_solve
from engine.factors.kronecker_factors import digest, mirrored_, unpacked
from engine.factors.representation_bytes import NUMBERS_AT_ONCE, low_rank_bytes
from engine.linalg.eigendecomposition import decompose
from engine.linalg.linear_operator import RowSide
from engine.memory.guard import Guard

_MOST_CANCELLED = 16
"""Up to here float32 keeps six digits of a product with the rows."""
_STRIP_ROWS = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank(RowSide):
    """``G = Σ_t (s_t u_t)(s_t u_t)ᵀ / w``, of its rows u.

    Memory:
        T·n numbers as they are stored; T² in float64 while a method runs, and 16 MiB of widened rows.
    """

    kind: ClassVar[Literal["woodbury"]] = "woodbury"
    scales: Tensor
    """s (T,) float64, beside the rows."""
    weight: float
    """w: loss terms."""
    known_gram: Tensor | None = None
    """Upper triangle of K (T(T+1)/2,) float64 on the host, where several ranks have summed it already."""
    rows_digest: str | None = None
    """SHA-256 of the rows, where it is known."""

    @override
    @property
    def size_bytes(self) -> int:
        return low_rank_bytes(self.count, self.size, self.rows.element_size())

    @override
    def trace(self) -> float:
        return float(sum(rows.square().sum() for _, rows in self._chunks(torch.float64)))

    @override
    def diagonal(self) -> Tensor:
        total = torch.zeros(self.size, dtype=torch.float64, device=self.computes_on)
        for _, rows in self._chunks(torch.float64):
            total += rows.square_().sum(0)
        return total.to("cpu")

    @override
    def frobenius_norm(self) -> float:
        return float(self.gram().norm())

    @override
    def spectral_norm(self) -> float:
        return float(self._values[-1]) if self.count else 0.0

    def scaled(self, least: torch.dtype = torch.float32) -> Tensor:
        """Return U/√w (T, n) on the host, of which ``G = Uᵀ U``, in the precision ``least`` or the rows', if wider.

        Memory:
            The rows in that precision.
        """
        dtype = torch.promote_types(self.rows.dtype, least)
        whole = torch.empty(self.rows.shape, dtype=dtype, device="cpu")
        for start, rows in self._chunks(dtype):
            whole[start : start + rows.shape[0]] = rows
        return whole

    def gram(self) -> Tensor:
        """K (T, T) float64, where arithmetic is done; one triangle is computed, in strips.

        Memory:
            T² numbers, and 16 MiB of widened columns.
        """
        if self.known_gram is not None:
            return unpacked(self.known_gram, self.count).to(self.computes_on)
        scales = self._root_scales()
        total = scales.new_zeros(self.count, self.count)
        width = max(NUMBERS_AT_ONCE // max(self.count, 1), 1)
        for start in range(0, self.size, width):
            columns = self.rows[:, start : start + width].to(self.computes_on).to(torch.float64)
            for top in range(0, self.count, _STRIP_ROWS):
                total[top : top + _STRIP_ROWS, top:].addmm_(columns[top : top + _STRIP_ROWS], columns[top:].T)
        return mirrored_(total).mul_(scales[:, None]).mul_(scales)

    @override
    def spectrum(self, layer: str, guard: Guard | None = None) -> tuple[Tensor, tuple[str, ...]]:
        if self.count > self.size:
            dense = decompose(self.to_dense(torch.float64), layer, guard=guard)
            return dense.values, dense.rungs
        gram = self.gram()
        if not bool(torch.isfinite(gram.diagonal()).all()):
            raise NonFiniteFactor(f"layer `{layer}`: the gradient rows of G hold NaN or Inf", layer=layer)
        found = decompose(gram, layer, guard=guard)
        values = torch.zeros(self.size, dtype=torch.float64)
        values[self.size - self.count :] = found.values
        return values, ("gram", *found.rungs)

    @override
    def eigenbasis(self, layer: str) -> tuple[Tensor, Tensor]:
        del layer
        values, inner = self._decomposed()
        vectors = self.combine(inner)
        # nearly orthonormal already, so a triangular factor of their Gram matrix is near the identity
        lower = torch.linalg.cholesky((vectors.T @ vectors).flip(0, 1)).T.flip(0, 1)
        height = max(NUMBERS_AT_ONCE // max(vectors.shape[1], 1), 1)
        for start in range(0, self.size, height):
            block = vectors[start : start + height]
            block.copy_(torch.linalg.solve_triangular(lower, block, upper=False, left=False))
        return values, vectors

    @override
    def apply(self, right: Tensor) -> Tensor:
        wide = self._arriving(right)
        total = torch.zeros_like(wide)
        scales = self._root_scales()[:, None]
        # all of them at once where none has to be moved or widened
        moved = self.rows.dtype != wide.dtype or self.rows.device != wide.device
        height = max(NUMBERS_AT_ONCE // max(self.size, 1), 1) if moved else max(self.count, 1)
        for start in range(0, self.count, height):
            part = slice(start, start + height)
            rows = self.rows[part].to(wide)
            # there are fewer of these than numbers of rows; their scales may lie beyond float32
            inner = (rows @ wide).to(torch.float64).mul_(scales[part]).mul_(scales[part])
            total.addmm_(rows.T, inner.to(wide.dtype))
        return total.to(right.device)

    @override
    def solve(self, right: Tensor, damping: float) -> Tensor:
        # split along the eigenvectors and projected twice
        wide = self._arriving(right).to(torch.float64)
        values, inner = self._decomposed()
        along = inner.T @ self._rows_apply(wide)
        rest = wide - self.combine(inner @ along)
        # what the first projection left by rounding would be divided by the damping alone
        again = inner.T @ self._rows_apply(rest)
        rest -= self.combine(inner @ again)
        along += again
        solved = self.combine(inner @ (along / (values + damping)[:, None])).add_(rest.div_(damping))
        return solved.to(right.device, right.dtype)

    def push_through(self, inner: Tensor, damping: float, eps: float = 1e-6) -> tuple[Tensor, Factorised]:
        """Return ``(G + damping·I)⁻¹ V`` of a ``V = Uᵀ inner / √w`` within the span of the rows.

        The T×T solve is done in float64, the product with the rows in the precision of ``inner``; all of it in
        float64, and without Cholesky, where that product would cancel.

        Args:
            inner: Coefficients of the rows, shape (T, k), any float dtype and device.
            damping: Positive, in the unit of the eigenvalues.
            eps: First jitter, relative to the mean diagonal of K.

        Returns:
            Shape (n, k), its dtype and device those of ``inner``, and the way it was computed.

        Memory:
            3 T² and 2 T·k numbers in float64, some 10 T² where rows depend on each other; the result.
        """
        gram, wide = self.gram(), inner.to(self.computes_on, torch.float64)
        solved, taken = robust_solve(gram, wide, damping, eps)
        if cancellation(gram, solved) <= _MOST_CANCELLED:
            narrow = solved.to(torch.promote_types(inner.dtype, torch.float32))
            return self.combine(narrow).to(inner.device, inner.dtype), taken
        found = self.combine(independent_solve(gram, wide, damping))
        return found.to(inner.device, inner.dtype), Factorised(rung="independent", jitter=0.0)

    @override
    def logdets(self, shifts: Tensor) -> Tensor:
        # T eigenvalues, and the shift itself n − T times
        wide = shifts.to("cpu", torch.float64)
        values = self._values
        return torch.log(values + wide[:, None]).sum(1) + (self.size - values.numel()) * wide.log()

    @override
    def effective_dimensions(self, shifts: Tensor) -> Tensor:
        values = self._values
        return (values / (values + shifts.to("cpu", torch.float64)[:, None])).sum(1)

    @override
    def to_dense(self, dtype: torch.dtype) -> Tensor:
        total = torch.zeros(self.size, self.size, dtype=dtype, device=self.computes_on)
        for _, rows in self._chunks(dtype):
            total.addmm_(rows.T, rows)
        return total

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"gradient_rows": self.rows.to("cpu"), "gradient_row_scales": self.scales.to("cpu")}

    @override
    def metadata(self) -> dict[str, str]:
        return {"gradient_representation": self.kind, "gradient_weight": repr(self.weight)}

    @override
    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Self:
        try:
            rows, scales, weight = tensors["gradient_rows"], tensors["gradient_row_scales"], metadata["gradient_weight"]
            found = cls(rows=rows, scales=scales, weight=float(weight))
        except (KeyError, ValueError) as error:
            raise BrokenFactors(f"the stored gradient rows lack or garble {error}", pointer="/factors") from error
        if rows.ndim != 2 or scales.shape != rows.shape[:1] or not found.weight > 0:
            raise BrokenFactors(
                f"stored gradient rows of shape {tuple(rows.shape)} do not go with scales of shape "
                f"{tuple(scales.shape)} and weight {found.weight}",
                pointer="/factors",
            )
        return found

    @override
    def digest(self) -> str:
        parts = (self.rows_digest or digest(self.rows), digest(self.scales), repr(self.weight))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def departed(self, rows: Tensor, rows_digest: str) -> Self:
        """Return the same side with its rows on the host, as they have come there.

        Args:
            rows: The rows (T, n) on the host.
            rows_digest: Their SHA-256.
        """
        return replace(self, rows=rows, rows_digest=rows_digest, scales=self.scales.to("cpu"))

    def factorised(self, damping: float, eps: float) -> Factorised:
        """Return how ``damping·I + K`` is inverted: by Cholesky, nearly always without any jitter.

        Args:
            damping: Positive, in the unit of K.
            eps: First jitter, relative to the mean diagonal of K.

        Returns:
            The way, and the jitter added.
        """
        gram = self.gram()
        return robust_solve(gram, gram.new_zeros(self.count, 0), damping, eps)[1]

    @cached_property
    def _values(self) -> Tensor:
        """The Gram matrix's eigenvalues (min(T, n),), ascending, float64 on the host."""
        values, _ = self.spectrum("")
        return values[max(self.size - self.count, 0) :]

    def _decomposed(self) -> tuple[Tensor, Tensor]:
        """Nonzero eigenvalues (r,) ascending, and ``V Λ^{-1/2}`` (T, r), which the rows turn into eigenvectors."""
        values, vectors = torch.linalg.eigh(self.gram())
        largest = values[-1].clamp_min(0) if values.numel() else values.new_zeros(())
        kept = values > NOISE * max(self.count, 1) * largest
        values = values[kept]
        return values, vectors[:, kept] / values.sqrt()

    def _root_scales(self) -> Tensor:
        """``s_t/√w`` (T,) float64."""
        return self.scales.to(self.computes_on) / math.sqrt(self.weight)

    def _chunks(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Rows of ``U/√w``, a few at a time: where they begin, and themselves."""
        scales = self._root_scales()
        height = max(NUMBERS_AT_ONCE // max(self.size, 1), 1)
        for start in range(0, self.count, height):
            rows = self.rows[start : start + height].to(self.computes_on)
            # through float64 where the scale may lie beyond the wider dtype
            yield start, (rows.to(torch.float64) * scales[start : start + height, None]).to(dtype)

    def _arriving(self, right: Tensor) -> Tensor:
        return right.to(self.computes_on, torch.promote_types(right.dtype, torch.float32))

    def _rows_apply(self, right: Tensor) -> Tensor:
        """``U right/√w`` (T, k)."""
        total = right.new_empty(self.count, right.shape[1])
        for start, rows in self._chunks(right.dtype):
            torch.mm(rows, right, out=total[start : start + rows.shape[0]])
        return total

    def combine(self, inner: Tensor) -> Tensor:
        """Return ``Uᵀ inner/√w``, shape (n, k), of coefficients (T, k) where arithmetic is done."""
        total = inner.new_zeros(self.size, inner.shape[1])
        for start, rows in self._chunks(inner.dtype):
            total.addmm_(rows.T, inner[start : start + rows.shape[0]])
        return total


def scaled_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert rows to their storage precision.

    Only float16 needs scales; the largest number of a row comes to lie between 2¹⁴ and 2¹⁵.

    Args:
        rows: Shape (T, n), any float dtype and device.
        dtype: Storage precision.

    Returns:
        The stored rows (T, n), and the power of two (T,), float64, that each is to be multiplied by.

    Memory:
        16 MiB of widened rows besides the result.
    """
    if dtype != torch.float16 or not rows.numel():
        return rows.to(dtype), torch.ones(rows.shape[0], dtype=torch.float64, device=rows.device)
    largest = torch.linalg.vector_norm(rows, math.inf, dim=1).to(torch.float64)
    _, exponents = torch.frexp(largest)
    scales = torch.ldexp(torch.ones_like(largest), torch.where(largest > 0, exponents - 15, 0))
    stored = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    height = max(NUMBERS_AT_ONCE // rows.shape[1], 1)
    for start in range(0, rows.shape[0], height):
        # through float64, which holds both a scale and what it is divided out of
        wide = rows[start : start + height].to(torch.float64)
        stored[start : start + height] = (wide / scales[start : start + height, None]).to(dtype)
    return stored, scales
