"""Statistics of a table of vectors that is a linear head's weight too, and the one Kronecker product they become.

In the head's orientation (V rows, d columns, one more for its bias) the curvature is the sum
``G_h ⊗ A_h + D ⊗ H`` of what head and table contribute, D diagonal. Of all products ``X ⊗ Y`` the
nearest to it in the Frobenius norm has X in the span of ``G_h, D`` and Y in that of ``A_h, H``:
rearranged, the sum is a matrix of rank two, whose leading singular pair follows from the inner
products of the two pairs, P and Q, as the leading eigenvector x of ``Q P``, with ``y ∝ P x``. All
inner products of positive semi-definite matrices are non-negative, hence so are x and y
(Perron–Frobenius), and X and Y stay positive semi-definite.

The product is then scaled to the trace of the sum. It would lose some otherwise, and traces are
what adds up over uses, and what is held against the exact trace of the block. What one example's
table and head have in common (the cross terms of its two gradients) is in neither term.

References:
    Van Loan & Pitsianis (1993), Approximation with Kronecker products
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.accumulation.layer_statistics import LayerStatistics
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.kronecker_factors import mirrored_
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.layers.layer import Use
from engine.layers.tied import TiedHeadLayer
from engine.linalg.gram import add_gram_

HeadSide = Tensor | SoftmaxFisher | DiagonalSketch
"""G of a head that holds its table's weight."""
_NUMBERS_AT_ONCE = 2**20


@dataclass(eq=False)
class TiedHeadStatistics(LayerStatistics):
    """Sums of a head, and those of the table that it shares its weight with."""

    counts: Tensor | None = None
    """(V,) how often each id was looked up."""
    vectors: Tensor | None = None
    """(d, d) ``Σ g gᵀ`` of the vectors looked up."""
    weight_counts: float = 0.0
    """Lookups, decayed with the sums."""
    head_diagonal: Tensor | None = None
    """(V,) the diagonal of the head's own normalised G, on the host, once the product is made."""
    residual: float | None = None
    """Frobenius norm of what the product misses, over that of the sum, once it is made; a sketched G is taken for
    its sketch."""

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the zeroed sums.

        Args:
            dtype: Precision of the sums.
            device: Device of the passes, where the table's sums are.

        Memory:
            2 V + d² numbers more than the head alone, V of them once the product is made.
        """
        super().allocate(dtype, device)
        self.counts = torch.zeros(self.layer.fan_out, dtype=dtype, device=device)
        self.vectors = torch.zeros(self.layer.fan_in, self.layer.fan_in, dtype=dtype, device=device)

    def decay_(self, past: float) -> None:
        """Weigh everything so far less.

        Args:
            past: Factor of a moving average, above 0 and at most 1.
        """
        super().decay_(past)
        for total in (self.counts, self.vectors):
            if total is not None:
                total.mul_(past)
        self.weight_counts *= past

    def add_input_(self, use: Use) -> None:
        """Add one call's input, of the head or of the table.

        Args:
            use: The call, with the tensor that entered it.
        """
        if not self._is_lookup(use):
            super().add_input_(use)
            return
        ids = use.input.reshape(-1)
        ids = ids if use.kept is None else ids[use.kept]
        self.positions += ids.numel()
        self.weight_counts += ids.numel()
        if self.counts is not None:
            self.counts += torch.bincount(ids, minlength=self.counts.shape[0]).to(self.counts.dtype)

    def add_gradient_(self, use: Use, gradient: Tensor) -> None:
        """Add one call's gradient, of the head or of the table, which has no `reduce`.

        Args:
            use: The call.
            gradient: Gradient of its output, of that output's shape, examples first.
        """
        if not self._is_lookup(use):
            super().add_gradient_(use, gradient)
            return
        self.gradients += 1
        if self.vectors is not None:
            rows = self.layer.table.gradient_rows(gradient) if isinstance(self.layer, TiedHeadLayer) else gradient
            rows = rows if use.kept is None else rows[use.kept]
            add_gram_(self.vectors, rows.to(self.vectors.dtype))

    def _is_lookup(self, use: Use) -> bool:
        layer = self.layer
        return isinstance(layer, TiedHeadLayer) and use.role is layer.table

    @property
    def rank_bounds(self) -> tuple[int, int]:
        """Zero twice: the rank of a sum is not bounded by the rows of one of its terms."""
        return 0, 0

    @property
    def explanation(self) -> str:
        """The layer that holds the weight, and the residual of describing both uses by one product."""
        if self.residual is None:
            return super().explanation
        found = (
            f"{self.layer.explanation}, scaled to its trace (relative residual {self.residual:.2g}); "
            "the cross terms of one example's two uses are left out"
        )
        return "; ".join(filter(None, (found, self.representation.why)))

    def nearest_product_(self, A: Tensor, G: HeadSide, *, identity: bool) -> tuple[Tensor, HeadSide]:
        """Compute A and G of both uses, and drop the table's sums.

        Args:
            A: The head's normalised A, shape (d, d), or (d + 1, d + 1) with a bias; overwritten.
            G: The head's normalised G, shape (V, V), dense or structured; a dense one is overwritten.
            identity: Whether the gradients of the table's vectors are set to the identity, as the head's are.

        Returns:
            A and G of the nearest product, of the same shapes.

        Raises:
            ValueError: If the sums were never allocated.

        Memory:
            Nothing of the size of V².
        """
        if self.counts is None or self.vectors is None:
            raise ValueError(f"layer `{self.layer.name}` was never allocated")
        # the head's sums may stand on the host
        where = A.device
        counts, vectors = self.counts.to(where), self.vectors.to(where)
        counts.div_(self.weight_counts or 1.0)
        mirrored_(vectors.div_(self.weight_G or 1.0))
        if identity:
            vectors.zero_().diagonal().fill_(1.0)
        width = vectors.shape[0]
        block, diagonal = A[:width, :width], G.diagonal().to(where)
        self.head_diagonal = diagonal.to("cpu", copy=True)
        P = _inner_products(_inner_of(G).to(where), _inner(diagonal, counts), _inner(counts, counts))
        Q = _inner_products(_inner(A, A), _inner(block, vectors), _inner(vectors, vectors))
        traces_G = torch.stack([diagonal.sum(dtype=torch.float64), counts.sum(dtype=torch.float64)]).cpu()
        traces_A = torch.stack(
            [A.diagonal().sum(dtype=torch.float64), vectors.diagonal().sum(dtype=torch.float64)]
        ).cpu()
        x, y = _leading_pair(P, Q)
        x, y = _scaled(x, y, traces_G, traces_A)
        self.residual = _residual(x, y, P, Q)
        G = _combined(G, counts, float(x[0]), float(x[1]))
        A.mul_(float(y[0]))[:width, :width].add_(vectors, alpha=float(y[1]))
        self.counts = self.vectors = None
        return A, G


def _inner_of(G: HeadSide) -> Tensor:
    """``‖G‖²``."""
    return _inner(G, G) if isinstance(G, Tensor) else torch.tensor(G.frobenius_norm() ** 2, dtype=torch.float64)


def _combined(G: HeadSide, counts: Tensor, x: float, y: float) -> HeadSide:
    """``x G + y diag(counts)``; a matrix is overwritten."""
    if isinstance(G, Tensor):
        G.mul_(x).diagonal().add_(counts, alpha=y)
        return G
    added = counts.to("cpu", torch.float64) * y
    return (
        G.plus_diagonal(x, added) if isinstance(G, DiagonalSketch) else replace(G, weights=G.weights * x, excess=added)
    )


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """``Σ left ∘ right`` in float64, a part at a time."""
    height = max(1, _NUMBERS_AT_ONCE * left.shape[0] // max(left.numel(), 1))
    total = torch.zeros((), dtype=torch.float64, device=left.device)
    for start in range(0, left.shape[0], height):
        total += (left[start : start + height].double() * right[start : start + height].double()).sum()
    return total


def _inner_products(first: Tensor, both: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, both, both, second]).view(2, 2).cpu()


def _leading_pair(P: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients of the nearest product: x of (G_h, D), and y of (A_h, H), none of them negative."""
    (a, b), (c, d) = (Q @ P).tolist()
    largest = (a + d + math.sqrt((a - d) ** 2 + 4 * b * c)) / 2
    # both solve the eigenvector's equation; one of them may vanish
    candidates = torch.tensor([[b, largest - a], [largest - d, c]], dtype=torch.float64).clamp_min(0)
    x = candidates[int(candidates.norm(dim=1).argmax())]
    if not bool(x.any()):
        x = torch.tensor([1.0, 0.0] if a >= d else [0.0, 1.0], dtype=torch.float64)
    norm = float(x @ P @ x)
    return x, P @ x / norm if norm > 0 else torch.tensor([1.0, 0.0], dtype=torch.float64)


def _scaled(x: Tensor, y: Tensor, traces_G: Tensor, traces_A: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with the trace of the sum, and with the head's trace of A where it has one."""
    wanted, found = float(traces_G @ traces_A), float(x @ traces_G) * float(y @ traces_A)
    if found <= 0:
        return x, y
    own = float(traces_A[0]) or float(traces_A[1])
    y = y * (own / float(y @ traces_A))
    return x * (wanted / (float(x @ traces_G) * own)), y


def _residual(x: Tensor, y: Tensor, P: Tensor, Q: Tensor) -> float:
    whole = float((P * Q).sum())
    if whole <= 0:
        return 0.0
    missed = whole - 2 * float((P @ x) @ (Q @ y)) + float(x @ P @ x) * float(y @ Q @ y)
    return math.sqrt(max(missed, 0.0) / whole)
