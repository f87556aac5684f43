"""The Kronecker product nearest to what a head and the table of its own weight contribute.

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

A product does not say what it was made of, and products do not add up: a merge of two sets needs the four
matrices. ``A_h``, H, D and the diagonal of ``G_h`` are kept beside the product, and ``G_h`` is in G itself.

References:
    Van Loan & Pitsianis (1993), Approximation with Kronecker products
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import NotMergeable
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.factor_set import TiedSums
from engine.factors.kronecker_factors import Factors
from engine.factors.softmax_fisher import SoftmaxFisher

HeadSide = Tensor | SoftmaxFisher | DiagonalSketch
"""G of a head that holds its table's weight."""
_NUMBERS_AT_ONCE = 2**20


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The contributions of head and table."""

    A: Tensor
    """(d, d), or (d + 1, d + 1) with a bias: the head's normalised A."""
    G: HeadSide
    """(V, V) the head's normalised G."""
    counts: Tensor
    """(V,) D, relative counts of the ids."""
    moments: Tensor
    """(d, d) H, second moments of the gradients of the vectors."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """The nearest product, and its coefficients."""

    A: Tensor
    G: HeadSide
    head_G: float
    table_G: float
    residual: float
    """Frobenius norm of what the product misses, over that of the sum; a sketched G is taken for its sketch."""


def nearest_product_(terms: Terms) -> Product:
    """Compute A and G of both uses, of the same shapes; A and a dense G of the terms are overwritten.

    The terms are all of one device and precision. Nothing of the size of V² is held.
    """
    A, G, counts, moments = terms.A, terms.G, terms.counts, terms.moments
    where, width = A.device, moments.shape[0]
    block, diagonal = A[:width, :width], G.diagonal().to(where)
    P = _inner_products(_inner_of(G).to(where), _inner(diagonal, counts), _inner(counts, counts))
    Q = _inner_products(_inner(A, A), _inner(block, moments), _inner(moments, moments))
    traces_G = torch.stack([diagonal.sum(dtype=torch.float64), counts.sum(dtype=torch.float64)]).cpu()
    traces_A = torch.stack([A.diagonal().sum(dtype=torch.float64), moments.diagonal().sum(dtype=torch.float64)]).cpu()
    x, y = _leading_pair(P, Q)
    x, y = _scaled(x, y, traces_G, traces_A)
    residual = _residual(x, y, P, Q)
    G = _combined(G, counts, float(x[0]), float(x[1]))
    A.mul_(float(y[0]))[:width, :width].add_(moments, alpha=float(y[1]))
    return Product(A=A, G=G, head_G=float(x[0]), table_G=float(x[1]), residual=residual)


def head_gradient(factors: Factors, sums: TiedSums) -> HeadSide:
    """Return the head's own G, as it was before it became one product with the table's."""
    diagonal = factors.head_diagonal
    if diagonal is None:
        raise NotMergeable(f"layer `{factors.layer}`: the parts of its product were not kept", layer=factors.layer)
    empty = not bool(diagonal.any())
    if sums.head_G == 0 and not empty:
        raise NotMergeable(
            f"layer `{factors.layer}`: the nearest product has no part of its head's G, which cannot be merged then",
            layer=factors.layer,
        )
    back = 0.0 if empty else 1 / sums.head_G
    if isinstance(factors.G, SoftmaxFisher):
        return replace(factors.G, weights=factors.G.weights * back, excess=None)
    if isinstance(factors.G, DiagonalSketch):
        raise NotMergeable(
            f"layer `{factors.layer}`: a sketch of its G cannot be merged exactly; raise the memory budget, so that "
            "its rows are kept",
            layer=factors.layer,
        )
    dense = factors.widened_G.to(torch.float64).mul_(back)
    dense.diagonal().copy_(diagonal.to(torch.float64))
    return dense


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
