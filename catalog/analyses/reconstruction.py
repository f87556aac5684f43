"""`reconstruction`: each layer's factors with their spectra clipped at κ_max, rebuilt or kept as an eigenbasis."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from catalog.analyses.analysis import SHAPE, Analysis, Column, Coverage, Figure
from catalog.brief import Brief
from catalog.record import FieldError, record
from catalog.requests.job import JobDocument


@record
class ReconstructionParams:
    """Options of the reconstruction; the condition number is `stabilisation.kappa_max`."""

    placement: Literal["auto", "device", "panels", "host"] = "auto"
    """Where a factor is rebuilt. `device`: all of it there; `panels`: factor and basis stay on the host, and tiles
    visit the device; `host`: on the CPU, in float64. `auto`: the first of these that fits; another begins there."""
    route: Literal["rebuild", "eigenbasis"] = "rebuild"
    """`rebuild`: the stabilised matrices; `eigenbasis`: eigenvectors and clipped eigenvalues, through which an inverse
    is applied to 1e-6 where a float32 matrix has lost a tenth of it (κ = 1e6). A side that is kept as gradient rows
    has no matrix, and stays an eigenbasis by either route; a head too wide for one stays an operator."""
    sides: Literal["both", "A", "G"] = "both"
    """Which factors are stabilised; the other one stays as it is."""
    keep_matrices: bool = True
    """Whether what was made stays as artifacts, below `stabilised/`; without, only its metrics and digests do."""
    decomposition: ClassVar[Literal["vectors"]] = "vectors"
    """Decomposition that a reconstruction needs."""

    def require_options(self, document: JobDocument) -> None:
        """Refuse a document without a condition number to clip at."""
        if document.stabilisation.kappa_max is None:
            raise FieldError(
                "stabilisation.kappa_max",
                "is null, and `reconstruction` clips at it; give a number above 1, such as 1e6",
            )


@record
class ReconstructedSide:
    """One factor, stabilised."""

    size: int
    """Rows."""
    kind: str
    """`matrix`, `diagonal`, or how a side that is never made dense is kept."""
    clipped: int | None
    """k: eigenvalues below the floor, raised to it."""
    unclipped: int | None
    """n − k."""
    update: str
    """`clipped`: M + Q_c(f − Λ_c)Q_cᵀ; `unclipped`: f·I + Q_u(Λ_u − f)Q_uᵀ; `none`: nothing was below the floor;
    `diagonal`; `eigenbasis`: not rebuilt; `operator`: not rebuilt, and applied through what is kept of a head that is
    too wide for its matrix; `not stabilised`: for the reason in `why`."""
    why: str | None
    """Why this side is not stabilised."""
    precision: str | None
    """What the update was summed in."""
    placement: str | None
    """Where the result was computed; null where nothing was rebuilt."""
    rungs: tuple[str, ...]
    """Placements tried, the last of which gave the result."""
    floor: float | None
    """λ_max/κ_max, as wanted."""
    floor_reached: float | None
    """Smallest eigenvalue of what came out; negative if rounding to its precision made it indefinite."""
    kappa_reached: float | None
    """λ_max/λ_min of what came out; null where that is singular or indefinite."""
    found_by: str | None
    """`eigenvalues` of the result in float64 (up to 1024 rows), `lanczos`, by which the smallest and the error are
    estimates, or `construction`, where the eigenvalues are what is kept."""
    trace: float | None
    """Sum of the eigenvalues before."""
    mass: float | None
    """Trace added: Σ (f − λ) over the clipped eigenvalues."""
    mass_share: float | None
    """The same over the trace before."""
    relative_error: float | None
    """‖M_stable − Q max(Λ, f) Qᵀ‖_F over ‖Q max(Λ, f) Qᵀ‖_F; null where nothing was rebuilt."""
    smallest: float | None
    """Smallest eigenvalue of a matrix of your own before, negative where it is indefinite; null for collected factors,
    which are not."""
    digest: str | None
    """SHA-256 of the stabilised factor as it is kept."""


@record
class ReconstructionMetrics(Brief):
    """One layer's stabilised factors."""

    form: str
    """`kronecker` (A dense), `diagonal` (A diagonal), `block` (exact block in G, A = 1) or `diagonal_block`."""
    kappa_max: float
    """The condition number that eigenvalues were clipped at."""
    A: ReconstructedSide | None
    """Null where A is 1, or was not asked for."""
    G: ReconstructedSide | None
    """Null where it was not asked for."""
    shared_A_with: str | None
    """Layer whose A this is; it is stabilised, and kept, once."""
    artifact: str | None
    """File that holds them; null without `keep_matrices`."""


@record
class ReconstructionSummary(Brief):
    """The whole model."""

    coverage: Coverage
    """Parameters that are covered and that are not, with reasons."""
    layers: int
    """Layers that are covered."""
    branches: Mapping[str, int]
    """Covered layers by `branch`: they add up to `layers`."""
    factors: int
    """Sides that were stabilised, a shared A once."""
    kappa_max: float
    """The condition number that eigenvalues were clipped at."""
    route: str
    """`reconstruction.route`."""
    clipped: int
    """Eigenvalues raised, over all of them."""
    eigenvalues: int
    """Eigenvalues of all stabilised factors."""
    clipped_share: float | None
    """`clipped` over `eigenvalues`."""
    mass_share: float | None
    """Trace added over the trace before, summed over the factors."""
    floor_kept: float | None
    """Least floor reached over floor wanted, over all factors in which something was clipped."""
    kappa_reached: float | None
    """Largest over all factors; null where one is singular."""
    relative_error: float | None
    """Largest over all rebuilt factors."""
    not_stabilised: tuple[str, ...]
    """Layers with a side that could not be, for the reason in its row."""


def _sides(row: Any) -> list[ReconstructedSide]:  # noqa: ANN401 - a row of the results
    metrics: ReconstructionMetrics | None = row.metrics
    return [] if metrics is None else [side for side in (metrics.A, metrics.G) if side is not None]


def _kappa(row: Any) -> float | None:  # noqa: ANN401 - a row of the results
    """Return the larger condition number of the two after clipping."""
    kappas = [side.kappa_reached for side in _sides(row)]
    known = [kappa for kappa in kappas if kappa is not None]
    return max(known) if known and len(known) == len(kappas) else None


def _floor_kept(row: Any) -> str | None:  # noqa: ANN401 - a row of the results
    """Return the smallest eigenvalue over the floor that was wanted, for the factor with the smaller ratio."""
    shares = [side.floor_reached / side.floor for side in _sides(row) if side.floor and side.floor_reached is not None]
    return None if not shares else "kept" if min(shares) >= 0.99 else f"{min(shares):.0%}"


def _placements(row: Any) -> str | None:  # noqa: ANN401 - a row of the results
    places = [side.placement or side.update.replace("eigenbasis", "basis") for side in _sides(row)]
    return "/".join(dict.fromkeys(places)) or None


_COLUMNS = (
    SHAPE,
    *(Column(f"metrics.{side}.clipped", f"clipped {side}", f"Clipped {side}",
             f"Eigenvalues of {side} below λ_max/κ_max; the bar is their share",
             form="fraction", whole=f"metrics.{side}.size") for side in "AG"),
    *(Column(f"metrics.{side}.kappa_reached", None, f"κ of {side}", f"Condition number of {side} after clipping")
      for side in "AG"),
    *(Column(f"metrics.{side}.relative_error", None, f"Error of {side}", "Relative distance from Q max(Λ, f) Qᵀ")
      for side in "AG"),
    Column(_kappa, "κ"),
    Column(_floor_kept, "floor"),
    Column(_placements, "where"),
)  # fmt: skip
_FIGURES = (
    Figure("Clipped", "{clipped_share:percent}", "{clipped} of {eigenvalues} eigenvalues",
           "Eigenvalues of A and G below λ_max/κ_max, which were raised to this floor.",
           "{clipped:count} of {eigenvalues:count} eigenvalues clipped at κ_max {kappa_max:-}"),
    Figure("Floor kept", "{floor_kept:portion}", "κ_max = {kappa_max}",
           "The smallest eigenvalue after clipping over the floor λ_max/κ_max, at its minimum over all factors.",
           "floor kept to {floor_kept:portion}"),
    Figure("Trace added", "{mass_share:percent}", "of the trace before clipping",
           "The part of the trace that clipping has added."),
    Figure("Error", "{relative_error:2}", ("{route:=eigenbasis}no factor was rebuilt", "largest of all factors"),
           "Relative distance of a stabilised factor from Q max(Λ, f) Qᵀ."),
)  # fmt: skip


def _sentence(options: Mapping[str, Any]) -> str:
    sides = {"both": "the factors A and G", "A": "the factor A", "G": "the factor G"}[options["sides"]]
    route = "rebuilt as matrices" if options["route"] == "rebuild" else "kept as eigenbases to invert through"
    return f"{sides} of each layer with the eigenvalues below λ_max/κ_max raised to it, {route}"


RECONSTRUCTION = Analysis(
    kind="reconstruction",
    title="Stabilised factors",
    description="Clip each factor's spectrum at κ_max; keep the stabilised matrices, or eigenbases to invert through.",
    implementation="engine.analyses.reconstruction:Reconstruction",
    params=ReconstructionParams,
    metrics=ReconstructionMetrics,
    summary=ReconstructionSummary,
    layerwise=True,
    takes_matrix="symmetric",
    columns=_COLUMNS,
    figures=_FIGURES,
    sentence=_sentence,
)
