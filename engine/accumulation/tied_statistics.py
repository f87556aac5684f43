"""Statistics of a table of vectors that is a linear head's weight too, and the one Kronecker product they become.

The head's sums are those of any linear layer. The table's are the counts of its ids and the second moment of
the gradients of their vectors; once all data has passed, ``engine.merging.nearest_product`` makes both one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from engine.accumulation.layer_statistics import LayerStatistics
from engine.factors.factor_set import TiedSums
from engine.factors.kronecker_factors import TiedParts, mirrored_
from engine.layers.layer import Use
from engine.layers.tied import TiedHeadLayer
from engine.linalg.gram import add_gram_, require_real
from engine.merging.nearest_product import HeadSide, Terms, nearest_product_


@dataclass(eq=False)
class TiedHeadStatistics(LayerStatistics):
    """Sums of a head, and those of the table that it shares its weight with."""

    NOT_SAVED: ClassVar[Mapping[str, str]] = {
        **LayerStatistics.NOT_SAVED,
        "made_of": "parts of a product on their way to the factors, which are on the disk once a checkpoint follows",
    }
    DECAYED: ClassVar[Sequence[str]] = (*LayerStatistics.DECAYED, "counts", "vectors", "weight_counts")
    JOINED: ClassVar[Mapping[str, Callable[[Sequence[Any]], Any]]] = {**LayerStatistics.JOINED, "weight_counts": sum}

    counts: Tensor | None = None
    """(V,) how often each id was looked up."""
    vectors: Tensor | None = None
    """(d, d) ``Σ g gᵀ`` of the vectors looked up."""
    weight_counts: float = 0.0
    """Lookups, decayed with the sums."""
    head_diagonal: Tensor | None = None
    """(V,) the diagonal of the head's own normalised G, on the host, once the product is made."""
    made_of: TiedParts | None = None
    """The other parts of the product, on the host, once it is made."""
    head_share: float = 0.0
    """Coefficient of the head's G in the product's, once it is made."""
    table_share: float = 0.0
    """Coefficient of the counts."""
    residual: float | None = None
    """Frobenius norm of what the product misses, over that of the sum, once it is made."""

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(dtype, device)
        self.counts = torch.zeros(self.layer.fan_out, dtype=dtype, device=device)
        self.vectors = torch.zeros(self.layer.fan_in, self.layer.fan_in, dtype=dtype, device=device)

    @override
    def add_input_(self, use: Use) -> None:
        # add one call's input, of the head or of the table
        if not self._is_lookup(use):
            super().add_input_(use)
            return
        ids = use.picked(use.input.reshape(-1))
        self.positions += ids.numel()
        self.weight_counts += ids.numel()
        if self.counts is not None:
            self.counts += torch.bincount(ids, minlength=self.counts.shape[0]).to(self.counts.dtype)

    @override
    def add_gradient_(self, use: Use, gradient: Tensor) -> None:
        # add one call's gradient, of the head or of the table, which has no `reduce`
        if not self._is_lookup(use):
            super().add_gradient_(use, gradient)
            return
        self.gradients += 1
        if self.vectors is not None:
            rows = self.layer.table.gradient_rows(gradient) if isinstance(self.layer, TiedHeadLayer) else gradient
            with self.precision.adding():
                add_gram_(self.vectors, require_real(use.picked(rows)).to(self.vectors.dtype))

    def _is_lookup(self, use: Use) -> bool:
        layer = self.layer
        return isinstance(layer, TiedHeadLayer) and use.role is layer.table

    @override
    @property
    def rank_bounds(self) -> tuple[int, int]:
        # zero twice: the rank of a sum is not bounded by the rows of one of its terms
        return 0, 0

    @override
    @property
    def explanation(self) -> str:
        # the layer that holds the weight, and the residual of describing both uses by one product
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
            V + d² + in² numbers on the host, which stay; nothing of the size of V².
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
        self.head_diagonal = G.diagonal().to(where).to("cpu", copy=True)
        self.made_of = TiedParts(
            A=A.to("cpu", copy=True), counts=counts.to("cpu", copy=True), moments=vectors.to("cpu", copy=True)
        )
        made = nearest_product_(Terms(A=A, G=G, counts=counts, moments=vectors))
        self.residual, self.head_share, self.table_share = made.residual, made.head_G, made.table_G
        self.counts = self.vectors = None
        return made.A, made.G

    @property
    def tied_sums(self) -> TiedSums:
        """The product's coefficients and the count of lookups."""
        return TiedSums(lookups=self.weight_counts, head_G=self.head_share, table_G=self.table_share)
