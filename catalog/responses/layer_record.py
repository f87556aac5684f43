"""The reproducibility record: what was done to one layer, with which numbers, on what.

Every layer of every analysis leaves one; fields of a stage that did not run are null. What may
differ between two faithful runs (times, memory) stands apart in ``Observed``, outside digests.
"""

from typing import Any, Literal

from catalog.record import canonical_json, record

Branch = Literal[
    "eigendecomposition",
    "woodbury",
    "softmax_head",
    "diagonal_sketch",
    "diagonal",
    "block",
    "diagonal_block",
    "trained",
    "declared",
]

WHOLE_MODEL = "(model)"
"""Name of the layer that a model is by itself, such as a bare ``nn.Linear``: its path in the model is empty."""
TABLE_COLUMNS = ("kind", "ordinal", "layer", "module", "status", "reason", "parameter_count")
"""The first columns of a table of layers; those of the metrics follow."""
# beginnings of a cell that a spreadsheet would run as a formula, or read as a new cell
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def table_cell(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a value as a cell of a table; an apostrophe goes before text that begins like a formula."""
    if isinstance(value, (list, tuple, dict)):
        value = canonical_json(value)
    if isinstance(value, str):
        text = value.replace("\0", "")
        return f"'{text}" if text.startswith(_FORMULA) else text
    return value


@record
class LayerRecord:
    """Reproducible facts of one layer."""

    in_dim: int | None
    """Rows of A, the column of ones included."""
    out_dim: int | None
    """Rows of G."""
    branch: Branch
    """How the layer's curvature is represented."""
    why: str
    """Why this branch."""
    policy: str | None
    """`woodbury.policy`."""
    damping_split: str | None
    """How λ_A and λ_G follow from `stabilisation.damping`: `pi` or `each`."""
    lambda_A: float | None
    """Damping of A in absolute numbers."""
    lambda_G: float | None
    """Damping of G in absolute numbers."""
    lambda_A_relative: float | None
    """Damping of A over A's mean eigenvalue."""
    lambda_G_relative: float | None
    """Damping of G over G's mean eigenvalue."""
    kappa_max: float | None
    """`stabilisation.kappa_max`."""
    kappa_A: float | None
    """λ_max/λ_min of A; null where A is singular."""
    kappa_G: float | None
    """λ_max/λ_min of G; null where G is singular."""
    kappa_A_clipped: float | None
    """λ_max/λ_min of A once eigenvalues below λ_max/κ_max are raised to it, also where A is singular."""
    kappa_G_clipped: float | None
    """The same of G."""
    clipped_A: int | None
    """Eigenvalues of A below λ_max/κ_max."""
    clipped_G: int | None
    """Eigenvalues of G below λ_max/κ_max."""
    update_freq: int | None
    """`collection.update_freq`."""
    update_index: int | None
    """Updates that entered the factors."""
    ema_decay: float | None
    """`collection.ema_decay`."""
    positions_local: int | None
    """T: positions that entered A on this rank."""
    positions: int | None
    """T over all ranks."""
    terms: int | None
    """Loss terms that entered G."""
    rank_bound_A: int | None = None
    """The most that A's rank can be: min(rows that entered it, `in_dim`); null where no count of rows bounds it."""
    rank_bound_G: int | None = None
    """The same of G and `out_dim`."""
    exact_trace: float | None
    """Trace of the layer's block of the curvature of the mean loss itself, from each example's squared gradient."""
    kronecker_trace: float | None
    """K-FAC's trace of the same block, tr(A)·tr(G)."""
    trace_ratio: float | None
    """`kronecker_trace` over `exact_trace`: 1 where K-FAC's scale is right."""
    trace_standard_error: float | None
    """Standard error of `exact_trace` over the examples as a sample, each weighted by its loss terms."""
    relative_variance_A: float | None
    """`E‖A_b − A‖² / ‖A‖²` of the factors A_b of single batches, by Frobenius norm; null without
    `collection.batch_variance`, and where `no_batch_variance` says why."""
    relative_variance_G: float | None
    """The same of G."""
    relative_standard_error_A: float | None
    """Standard error of A over its batches as a sample, relative to ‖A‖: of its noise as an estimate."""
    relative_standard_error_G: float | None
    """The same of G."""
    no_batch_variance: str | None
    """Why one of them or both are null, where `collection.batch_variance` asked for them."""
    gradient_identity: float | None
    """Largest relative difference between the layer's rows and the gradient of each checked example alone, by plain
    autograd; null where nothing was checked (`collection.self_check: off`, or stored factors that do not say)."""
    examples_checked: int | None
    """Examples that were held against themselves alone."""
    checked_against: str | None
    """What the rows were held against: `alone` (each example by itself), `single` (batches of one example: that
    examples do not mix is not shown), `inputs` (`forward_only` has no gradients), or `same_forward` (unverified by
    example: the model draws random numbers, or its batches cannot be taken apart)."""
    identity_tolerance: float | None
    """Relative difference up to which the layer counts as covered, where the check that decided could not hold it to
    that of float64; null where nothing was to be decided, or float64 decided."""
    identity_tolerance_reason: str | None
    """Why that tolerance is above the one of float64."""
    world_size: int | None
    """Processes that collected together."""
    reduction: str | None
    """How the processes' sums were combined."""
    sent_bytes: int | None
    """Bytes that this process has sent to the others for it."""
    pieces: int | None
    """Sums over disjoint examples that were added up: pieces of a job with `shards`; 1 of an undivided one."""
    storage_device: str | None
    """Where the factor is kept."""
    storage_policy: str | None
    """How the factor was kept while others were collected."""
    dtype: str | None
    """Precision the factors are kept in, gradient rows apart; digests and eigenvalues are of these numbers."""
    accumulation_dtype: str | None
    """Precision of the sums behind them."""
    accumulation_precision: str | None
    """The precision of the products that add up A and G: `ieee` (the width of the sums) or `tf32`."""
    accumulation_fallback: str | None
    """Why that is not what was asked for."""
    amp: str | None
    """What the model computed in: `off` (float32 or float64 throughout), `bf16` or `fp16`."""
    amp_fallback: str | None
    """Why that is not what was asked for."""
    loss_scale: float | None
    """Power of two that `fp16` came to multiply directions by; it is divided out of everything."""
    scale_A: float | None
    """Power of two that the kept A is multiplied by; 1 but for float16."""
    scale_G: float | None
    """The same of G."""
    factor_bytes: int | None
    """Bytes of the factors as they are held."""
    gradient_rows: int | None
    """Rows kept in place of G; null where G is dense."""
    gradient_rows_dtype: str | None
    """Precision of those rows."""
    gradient_rows_device: str | None
    """Where they stood while they were collected: `device` or `host`."""
    sketch_bound: float | None
    """How far a sketched G is from G at most, in the spectral norm; null where nothing is sketched."""
    cholesky_jitter: float | None
    """What had to be added to the damped Gram matrix of the rows for a Cholesky factorisation; null without rows."""
    fisher: str | None
    """`collection.fisher`."""
    sharing: str | None
    """`collection.sharing`."""
    samples: int | None
    """`collection.samples`."""
    seed: int | None
    """`collection.seed`."""
    passes: int | None
    """Passes over the data."""
    micro_batch: int | None
    """Examples that went through the model at once; null is the whole batch."""
    digest_A: str | None
    """SHA-256 over dtype, shape and little-endian bytes of A (of its diagonal where A is diagonal)."""
    digest_G: str | None
    """The same of G."""
    digest_ekfac: str | None
    """The same of EK-FAC's corrected eigenvalues; null without `collection.ekfac`."""
    digest_eigenvectors_A: str | None
    """The same of the eigenvectors of A that they belong to; null where those are the identity's."""
    digest_eigenvectors_G: str | None
    """The same of those of G."""
    ekfac_trace: float | None
    """Sum of the corrected eigenvalues: the exact trace up to rounding."""
    rungs_A: tuple[str, ...] | None
    """Rungs of the eigendecomposition's ladder that were tried for A, the last of which gave it."""
    rungs_G: tuple[str, ...] | None
    """The same of G."""
    precision: str | None
    """Of the eigendecompositions' arithmetic; null where none was asked for."""
    residual_A: float | None
    """‖A − QΛQᵀ‖/‖A‖ of the eigenvectors of A, by Frobenius norm, from 8 random products above 128 rows; null
    where none were asked for."""
    residual_G: float | None
    """The same of G."""
    nondeterministic: tuple[str, ...] | None
    """Operations of the model without a deterministic form, which another run may round otherwise."""
    planned_peak_bytes: int | None
    """The plan's peak for the job that this layer belongs to, without what the process held before."""


@record
class Observed:
    """What this run took; another faithful run may differ."""

    seconds: float
    """Seconds that the layer took."""
    allocated_before_bytes: int | None
    """Device bytes held by tensors; null on a CPU."""
    allocated_after_bytes: int | None
    """The same after the layer."""
    reserved_before_bytes: int | None
    """Device bytes held by the allocator; null on a CPU."""
    reserved_after_bytes: int | None
    """The same after the layer."""
    host_before_bytes: int
    """Resident set of the process."""
    host_after_bytes: int
    """The same after the layer."""
    not_replayed: tuple[str, ...]
    """What the job's first attempt computed with and this one could not repeat."""
    refused_rungs: tuple[str, ...]
    """Rungs of either side's eigendecomposition that were passed over, with the bytes that each needs and that were
    free, or with the one of the device that an earlier attempt ended in."""
    factors_from: str | None
    """The earlier job whose collection the cache gave, and its key; null where the factors were collected here."""
    measured_peak_bytes: int
    """Highest resident set (CPU) or highest reserved device bytes so far."""
