"""`compression`: each factor, or a matrix of the caller's, as a structure of O(N log N) numbers, with its error."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from catalog.analyses.analysis import SHAPE, Analysis, Column, Coverage, Figure
from catalog.brief import Brief
from catalog.record import FieldError, option, record


@record
class CompressionParams:
    """Options of the compression."""

    structure: Literal["auto", "tridiagonal_lowrank", "block_sss"] = "auto"
    """`tridiagonal_lowrank`: T + U Vᵀ; `block_sss`: sequentially semiseparable, for matrices whose order of rows means
    something; `auto`: the one with the smallest measured error within the bytes of T + U Vᵀ at `rank`, or with the
    fewest bytes within `tolerance`. Where nothing takes fewer bytes than the matrix, it stays dense."""
    rank: int | None = None
    """r of T + U Vᵀ; null takes ⌈log₂ N⌉. With `tolerance` it is the first that is tried."""
    block: int | None = None
    """Rows of a block, of `block_sss`; null takes 16."""
    order: int | None = None
    """The largest order, of `block_sss`; null, without `tolerance`, takes as many bytes as T + U Vᵀ at ⌈log₂ N⌉."""
    tolerance: float | None = None
    """The largest relative error, by Frobenius norm."""
    num_levels: int = option(3, known_as="num_levels")
    """Levels of a hierarchical T + Σ U Vᵀ, each with the rank of the logarithm of the one before."""
    use_mixed_precision: bool = option(False, known_as="use_mixed_precision")
    """Whether U and V are held in float16, with a power of two for each column, and T in float32."""
    use_hierarchical: bool = option(False, known_as="use_hierarchical")
    """Whether T + U Vᵀ has several levels, which take more bytes than one."""
    decomposition: ClassVar[Literal["none"]] = "none"
    """Parts of the eigendecompositions that are asked for: none, since structures are fitted to the factors."""

    def __post_init__(self) -> None:
        """Refuse numbers outside their meaning, and options of another structure than the one that is asked for."""
        for name in ("rank", "block", "order", "num_levels"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise FieldError(name, f"is {number}; take 1 or more")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise FieldError("tolerance", f"is {self.tolerance}; take a number between 0 and 1, such as 0.01")
        if self.tolerance is not None and self.order is not None:
            raise FieldError("tolerance", "and `order` are both given, and each decides the orders; leave one out")
        for name, structure in _OF_STRUCTURE.items():
            if getattr(self, name) not in (None, False) and self.structure != structure:
                raise FieldError(
                    name, f"is an option of `structure: {structure}`, and `{self.structure}` is asked for; leave it out"
                )
        if self.rank is not None and self.structure == "block_sss":
            raise FieldError("rank", "is an option of T + U Vᵀ, and `structure` is `block_sss`; take `order`")
        if self.use_hierarchical and (self.rank is not None or self.tolerance is not None):
            name = "rank" if self.rank is not None else "tolerance"
            raise FieldError(name, "decides the rank, and so does `use_hierarchical` by `num_levels`; leave one out")


_OF_STRUCTURE = {
    "block": "block_sss",
    "order": "block_sss",
    "use_mixed_precision": "tridiagonal_lowrank",
    "use_hierarchical": "tridiagonal_lowrank",
}


@record
class CompressedSide:
    """One factor, or a matrix of your own."""

    size: int
    """Rows."""
    structure: str
    """`tridiagonal_lowrank`, `block_sss`, `dense`, or the way that a side is kept which is not a dense matrix."""
    why: str
    """Why this structure, with the figures that decided."""
    relative_error: float | None
    """Relative error by Frobenius norm, measured, that of 16 bits included; 0 where it stays as it is."""
    error_bound: float | None
    """Upper bound of the relative error that the construction of `block_sss` states without looking at the matrix
    again; null for other structures, whose error is measured alone."""
    total_bytes: int | None
    """Bytes of the structure, or of the dense matrix; null where it stays as it was collected."""
    dense_bytes: int | None
    """Bytes of the matrix in the precision that it was computed with."""
    tridiagonal_bytes: int | None
    """Bytes of T."""
    lowrank_bytes: int | None
    """Bytes of U and V."""
    memory_reduction_vs_dense: float | None
    """Share that is saved of a dense matrix: of one in float32 for T + U Vᵀ, of one as precise for `block_sss`."""
    memory_reduction_vs_fp32: float | None
    """Share that is saved of the same T + U Vᵀ in float32."""
    total_rank: int | None
    """Columns of U."""
    ranks_per_level: tuple[int, ...] | None
    """Rank of each level."""
    largest_order: int | None
    """The largest order of a block SSS matrix."""
    block: int | None
    """Rows of its blocks."""
    digest: str | None
    """SHA-256 over the structure's tensors, in the order of their names."""


@record
class CompressionMetrics(Brief):
    """One layer."""

    form: str
    """`kronecker` (A dense), `diagonal` (A diagonal), `block` (exact block in G, A = 1) or `diagonal_block`."""
    A: CompressedSide | None
    """Null where A is 1."""
    G: CompressedSide
    """The gradient side, or the matrix of your own."""
    shared_A_with: str | None
    """Layer whose A this is; it is compressed, and kept, once."""
    artifact: str | None
    """File that holds the structures; null where every side stays as it is."""


@record
class CompressionSummary(Brief):
    """The whole model."""

    coverage: Coverage
    """Parameters that are covered and that are not, with reasons."""
    layers: int
    """Layers that are covered."""
    sides: int
    """Sides that are matrices, a shared A once."""
    structures: Mapping[str, int]
    """The number of sides by structure, `dense` among them."""
    total_bytes: int
    """Bytes of all of them as they are held now."""
    dense_bytes: int
    """Bytes of all of them as dense matrices."""
    saved_share: float | None
    """1 − total over dense; null where nothing is a matrix."""
    relative_error: float | None
    """The largest of all sides."""


def _side(name: str, field: str, short: str | None, title: str, text: str, **form: Any) -> Column:  # noqa: ANN401
    return Column(f"metrics.{name}.{field}", short, title, text, **form)


_COLUMNS = (
    SHAPE,
    *(_side(name, "structure", name, f"{name} as", f"The structure that holds {name}") for name in "AG"),
    *(_side(name, "relative_error", f"error {name}", f"Error of {name}", "Relative, by Frobenius norm, measured")
      for name in "AG"),
    *(_side(name, "total_bytes", None, f"Bytes of {name}", f"The bar is their share of the dense {name}",
            whole=f"metrics.{name}.dense_bytes") for name in "AG"),
)  # fmt: skip
_FIGURES = (
    Figure("Saved", "{saved_share:percent}", "{total_bytes} of {dense_bytes} bytes",
           "Bytes of the structures beside those of the dense matrices, over all sides.",
           "{saved_share:percent} of {dense_bytes:count} bytes saved"),
    Figure("Error", "{relative_error:2}", "largest of {sides} sides",
           "Relative distance of a structure from its matrix, by Frobenius norm.",
           "error at most {relative_error:2}"),
)  # fmt: skip


def _sentence(options: Mapping[str, Any]) -> str:
    structure = {
        "auto": "the structure with the smallest measured error or the fewest bytes",
        "tridiagonal_lowrank": "a tridiagonal matrix plus one of low rank",
        "block_sss": "a block sequentially semiseparable matrix",
    }[options["structure"]]
    within = "" if options["tolerance"] is None else f" within a relative error of {options['tolerance']:g}"
    return f"{structure} for each factor A and G{within}, and its error"


COMPRESSION = Analysis(
    kind="compression",
    title="Compressed factors",
    description="Hold each factor, or a matrix of your own, in O(N log N) numbers, with the error that this makes.",
    implementation="engine.analyses.compression:Compression",
    params=CompressionParams,
    metrics=CompressionMetrics,
    summary=CompressionSummary,
    layerwise=True,
    takes_matrix="any",
    columns=_COLUMNS,
    figures=_FIGURES,
    sentence=_sentence,
    damped=False,
)
