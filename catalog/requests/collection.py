"""Collection options: how curvature is collected, and, apart from it, how it is stabilised afterwards.

The two are separate records because another damping needs no new collection.
"""

from typing import Literal

from catalog.record import FieldError, option, record

MAX_BATCH_SIZE = 65_536
MAX_SEED = 2**63 - 1


@record
class Collection:
    """One pass of the data through the model, gathering `A = E[a aᵀ]` and `G = E[g gᵀ]` of each layer."""

    fisher: Literal["mc", "empirical", "type2", "forward_only"] = "mc"
    """`mc` samples labels from the model; `type2` is the exact generalised Gauss-Newton; `empirical` takes
    the data's labels (not the Fisher); `forward_only` sets G to the identity."""
    sharing: Literal["expand", "reduce"] = "expand"
    """Whether positions that share a weight count as examples (`expand`) or are pooled first (`reduce`)."""
    samples: int = 1
    """Labels sampled per example and loss term, for `mc`."""
    batch_size: int = 64
    """Examples in a batch. The plan may send a batch through the model in slices."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of the passes and of the accumulators."""
    amp: Literal["off", "bf16", "fp16"] = option("off", known_as="use_amp")
    """Whether the model computes in 16 bits where torch deems that safe; the sums stay in float32. `fp16` is for
    CUDA. A device that can not falls back to float32, and each layer's record says so."""
    precision: Literal["ieee", "tf32"] = "ieee"
    """How float32 rows are multiplied that add up A and G. `tf32` lets a CUDA device of compute capability 8.0 or above
    round them to 11 bits, and adds in float32; the model, checks and decompositions stay at full width. A device that
    can not falls back to `ieee`, and each layer's record says so."""
    storage_dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    """Precision the factors are kept, digested and decomposed in; null is that of the sums. A wider one holds the
    same numbers. `bfloat16` rounds to 8 bits; `float16` to 11, times one power of two per factor, below which
    what is 2^39 smaller than the largest entry becomes zero."""
    seed: int = 0
    """Key of the sampled labels, together with each example's index."""
    update_freq: int = option(1, known_as="update_freq")
    """Every Nth batch enters the factors, from the first; the other N − 1 are dropped. With 10, as many scripts have
    it, nine of ten batches are never computed with, and the factors are means over a tenth of the data."""
    ema_decay: float | None = option(None, known_as="ema")
    """Weight that the past keeps at each update; null is the plain average."""
    nested: bool = False
    """Keep the statistics of the first N/8, N/4 and N/2 of the N examples too, at no extra pass, so that
    metrics show whether they have converged. A size is reached at the end of the batch that crosses it."""
    min_coverage: float | None = None
    """Least share (0 to 1) of the trainable numbers that must be covered, or the job fails before it computes; null
    asks only that what is not covered is declared, which always holds."""
    exact_trace: bool = True
    """Whether the exact trace of each layer's block is gathered beside K-FAC's, which says how far the two differ."""
    batch_variance: bool = False
    """Whether the variance of A and of G over batches is gathered, at no extra pass: how far the factors of single
    batches are from the factor of all, and its standard error. It takes a second set of sums. Factors may differ in
    their last digits from those without it, as each batch is summed by itself."""
    ekfac: bool = False
    """Whether further passes over the data re-estimate the eigenvalues in the eigenbases of A and G (EK-FAC)."""

    reduction: Literal["auto", "gram", "gather", "dense", "none"] = option("auto", known_as="kfac_distributed_reduce")
    """How several ranks (torch.distributed) add up the gradient rows of a layer. `gram`: each rank receives its share
    of the columns of all rows, and one triangle of the T×T Gram matrix is summed; `gather`: each receives all rows;
    `auto`: whichever moves fewer bytes; `dense`: no layer keeps rows, and G itself is summed; `none`: nothing is, which
    is refused where more than one rank holds data. A is summed in all of them. Without ranks it has no meaning."""
    self_check: Literal["first", "growing", "off"] = "growing"
    """Whether each layer proves on these data that its rows are the gradient of each example alone: on the first
    batch (`first`), and on an example of batches 1, 2, 4, 8 and so on, and of any whose shapes are new (`growing`)."""

    def __post_init__(self) -> None:
        """Refuse values outside their meaning."""
        if not 1 <= self.batch_size <= MAX_BATCH_SIZE:
            raise FieldError("batch_size", f"is {self.batch_size}; take 1 to {MAX_BATCH_SIZE}")
        if not 1 <= self.samples <= 1024:
            raise FieldError("samples", f"is {self.samples}; take 1 to 1024")
        if self.samples > 1 and self.fisher != "mc":
            raise FieldError("samples", f"is {self.samples}, but only `mc` samples labels; take 1 or `fisher: mc`")
        if not 0 <= self.seed <= MAX_SEED:
            raise FieldError("seed", f"is {self.seed}; take 0 to 2^63-1")
        if self.dtype == "float64":
            self._require_full_width()
        if self.update_freq < 1:
            raise FieldError("update_freq", f"is {self.update_freq}; take 1 (every batch) or more")
        if self.ekfac and self.fisher == "forward_only":
            raise FieldError("ekfac", "needs gradients, and `forward_only` takes none; take another `fisher`")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise FieldError("ema_decay", f"is {self.ema_decay}; take a number between 0 and 1, or null")
        if self.min_coverage is not None and not 0 <= self.min_coverage <= 1:
            raise FieldError("min_coverage", f"is {self.min_coverage}; take a share from 0 to 1, or null")

    def _require_full_width(self) -> None:
        for name, full in (("amp", "off"), ("precision", "ieee")):
            value = getattr(self, name)
            if value != full:
                raise FieldError(name, f"is {value}, which narrows float32; take `dtype: float32`, or `{name}: {full}`")


@record
class Stabilisation:
    """Damping added to the spectrum and the condition number it is clipped at."""

    damping: float = option(1e-4, known_as="damping")
    """What is added to the spectrum, as `damping_mode` reads it."""
    damping_mode: Literal["relative", "absolute"] = "relative"
    """`relative`: λ = damping · mean eigenvalue of the layer's `G ⊗ A`; `absolute`: λ = damping."""
    damping_split: Literal["each", "pi"] = "pi"
    """How A and G share λ in (A + λ_A I) ⊗ (G + λ_G I). `pi`: λ_A = π√λ and λ_G = √λ/π with
    π = √(mean eigenvalue of A / mean eigenvalue of G), so that λ_A λ_G = λ (Martens & Grosse 2015); `each`: both
    sides get `damping` itself, by `damping_mode`: in absolute numbers, or relative to each side's own mean eigenvalue.
    Scripts that add one damping to A and to G mean `each` and `absolute`."""
    damping_A: float | None = None
    """Overrides the damping of A, read by the same mode (relative to A's own mean eigenvalue)."""
    damping_G: float | None = None
    """Overrides the damping of G, read by the same mode (relative to G's own mean eigenvalue)."""
    kappa_max: float | None = option(
        1e6,
        known_as={
            "max_condition_number": "",
            "use_eigenvalue_correction": "false is null; it means clipping, and EK-FAC's correction is "
            "`collection.ekfac`",
        },
    )
    """Eigenvalues below λ_max/κ_max count as clipped; null is no clipping."""

    def __post_init__(self) -> None:
        """Refuse damping that is not positive and condition numbers below one."""
        for name in ("damping", "damping_A", "damping_G"):
            value = getattr(self, name)
            if value is not None and not 1e-30 <= value <= 1e30:
                raise FieldError(name, f"is {value}; take a positive number between 1e-30 and 1e30")
        if self.kappa_max is not None and not 1 < self.kappa_max <= 1e30:
            raise FieldError("kappa_max", f"is {self.kappa_max}; take a number above 1, or null for no clipping")
