"""Jobs written straight into the ledger, as a worker would: plausible rows, spectra and summaries."""

import hashlib
import itertools
import json
import math
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from catalog.analyses.analysis import (
    Coverage,
    CoverageKind,
    CoveragePart,
    LayerResult,
    LookedAt,
    NamedParameters,
    RefusedAnalysis,
)
from catalog.analyses.capacity import CapacitySummary
from catalog.analyses.capacity_metrics import (
    CapacityMetrics,
    EffectiveDimensionCurve,
    ModelCapacity,
    Quantile,
    SpectralDecay,
    SpectralDensity,
    TopEigenvalue,
    TraceShare,
)
from catalog.analyses.factors import FactorsMetrics, FactorsSummary
from catalog.analyses.subsamples import Convergence
from catalog.frames import (
    ArtifactWritten,
    Divided,
    Failed,
    Finished,
    Reading,
    Started,
    Summarised,
    decode,
    encode,
    layer_frame,
)
from catalog.record import plain
from catalog.requests.pieces import Piece
from catalog.responses.layer_record import LayerRecord, Observed
from catalog.responses.views import CallerFrame
from jobs.codec import parse_document
from jobs.objects.artifacts import ArtifactFolder
from jobs.queue import attempt_endings, attempt_writes, claims
from jobs.queue.division import divide
from jobs.records import Claim
from jobs.repository.pieces import read_pieces
from jobs.repository.submission import submit

DOCUMENT: dict[str, Any] = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "keep": ["spectra"],
    "labels": {"purpose": "first look"},
}

# name, class, rows of A, rows of G, parameters
LAYERS = [
    ("features.0", "Conv2d", 10, 16, 160),
    ("features.1", "BatchNorm2d", 1, 32, 32),
    ("features.3", "Conv2d", 145, 32, 4640),
    ("features.4", "BatchNorm2d", 1, 64, 64),
    ("features.7", "Conv2d", 289, 48, 13872),
    ("head.0", "Linear", 193, 64, 12352),
    ("head.2", "Linear", 65, 10, 650),
]
DECLARED = ("head.temperature", "Scale", 1)


def raw(document: dict[str, Any] = DOCUMENT) -> bytes:
    return json.dumps(document).encode()


def spectrum(rows: int, top: float, decay: float, dead: int = 0) -> list[float]:
    """A power law that bends down at its end; ascending, the last directions at zero."""
    values = [top * (k + 1) ** -decay * math.exp(-3.5 * (k / rows) ** 3) for k in range(rows - dead)]
    return [0.0] * dead + sorted(values)


def claimed(engine: Engine, tenant_id: str, document: dict[str, Any] = DOCUMENT) -> Claim:
    job = submit(engine, tenant_id, parse_document(raw(document))).job
    claim = claims.claim(engine, job.id, "test", secrets.token_hex(8), 600)
    assert claim is not None
    attempt_writes.write_started(engine, claim, Started(environment={"torch": "2.13.0", "device": "cpu", "threads": 1}))
    return claim


def running(engine: Engine, tenant_id: str, document: dict[str, Any] = DOCUMENT) -> Claim:
    """A job in the middle of its collection."""
    claim = claimed(engine, tenant_id, document)
    progress(engine, claim, stage="collection", done=17, total=29, unit="batches", percent=41.0)
    return claim


def progress(engine: Engine, claim: Claim, **values: Any) -> None:
    shown = {"layers_done": 0, "layers_total": len(LAYERS) * len(claim.kinds), **values}
    attempt_writes.write_progress(engine, claim, shown)


def failed(engine: Engine, tenant_id: str) -> str:
    claim = claimed(engine, tenant_id, {**DOCUMENT, "kind": "capacity"})
    failure = Failed(
        category="usage",
        code="non_finite_weights",
        message="the tensor `features.3.weight` holds 3 values that are not finite; repair the checkpoint",
        pointer="/model",
        layer="features.3",
        detail="SECRET traceback of the operator",
    )
    attempt_endings.fail(engine, claim, failure)
    return claim.job_id


def failed_in_factory(engine: Engine, tenant_id: str) -> str:
    """A job whose factory raised."""
    claim = claimed(engine, tenant_id, {**DOCUMENT, "kind": "capacity"})
    failure = Failed(
        category="usage",
        code="factory_failed",
        message="factory `lab.models:make` raised ValueError: no weights",
        pointer="/model/factory",
        layer=None,
        detail="SECRET traceback of the operator",
        trace=(
            CallerFrame(module="lab.models", line=12, function="make"),
            CallerFrame(module="lab.weights", line=7, function="Store.read"),
        ),
    )
    attempt_endings.fail(engine, claim, failure)
    return claim.job_id


def finished(
    engine: Engine,
    root: Path | ArtifactFolder,
    tenant_id: str,
    document: dict[str, Any] = DOCUMENT,
    *,
    with_factors: bool = False,
) -> str:
    """A job that is done, with everything that the page draws."""
    claim = claimed(engine, tenant_id, document)
    write_rows(engine, root, claim)
    artifact(engine, root, claim, "memory_curve.json", json.dumps(memory_curve()).encode(), "application/json")
    if with_factors:
        artifact(engine, root, claim, "factors/factors.index.json", b"{}", "application/json")
    summarise(engine, claim)
    attempt_endings.finish(engine, claim)
    return claim.job_id


def summarise(engine: Engine, claim: Claim, **changes: Any) -> None:
    """Write the summaries; ``changes`` are of their coverage."""
    for kind in claim.kinds:
        values = plain(summary(kind))
        values["coverage"] |= changes
        attempt_writes.write_summary(engine, claim, Summarised(kind=kind, summary=values))


def partly_measured(
    engine: Engine, root: Path | ArtifactFolder, tenant_id: str, document: dict[str, Any] = DOCUMENT
) -> str:
    """A job that is done, and has measured 35.1 % of its model."""
    claim = claimed(engine, tenant_id, document)
    write_rows(engine, root, claim)
    reasons = {"embedding_renormalised": 45_000, "unheard_of": 13_767, "no_gradient": 1}
    words = NamedParameters(names=("words.weight",), module="Embedding", why=None)
    summarise(
        engine,
        claim,
        trainable_parameters=90_538,
        declared_parameters=58_768,
        covered_share=0.3509,
        reasons=reasons,
        parts=[
            plain(part("block", None, 31_770)),
            *(plain(part("not_covered", reason, count, words)) for reason, count in reasons.items()),
        ],
    )
    attempt_endings.finish(engine, claim)
    return claim.job_id


def of_diagonals(engine: Engine, root: Path | ArtifactFolder, tenant_id: str) -> str:
    """A job that is done, and has kept a diagonal alone of 91.7 % of its model."""
    claim = claimed(engine, tenant_id, DOCUMENT)
    write_rows(engine, root, claim)
    table = NamedParameters(names=("positions",), module="Encoder", why="no product to factorise")
    parts = [part("block", None, 2_637), part("diagonal", None, 29_133, table)]
    summarise(
        engine,
        claim,
        trainable_parameters=31_770,
        declared_parameters=0,
        covered_share=1.0,
        reasons={},
        parts=list(map(plain, parts)),
    )
    attempt_endings.finish(engine, claim)
    return claim.job_id


def of_experts(engine: Engine, root: Path | ArtifactFolder, tenant_id: str) -> str:
    """A job that is done, of whose ten experts' layers nine are starved and one, with markup in its name, is idle."""
    claim = claimed(engine, tenant_id, DOCUMENT)
    write_rows(engine, root, claim)
    starved = [
        {"layer": f"experts.{at}", "tokens": at, "factor": "A", "rank_bound": at, "columns": 64, "times_more": 64 / at}
        for at in range(1, 9)
    ]
    experts = {"layers": 10, "fewest": 0, "most": 9, "starved": 9, "most_starved": starved}
    idle = {"unreached": 1, "unreached_layers": ["<b>experts</b>.down_proj[9]"]}
    summarise(engine, claim, experts={**experts, **idle})
    attempt_endings.finish(engine, claim)
    return claim.job_id


def part(kind: CoverageKind, reason: str | None, parameters: int, *named: NamedParameters) -> CoveragePart:
    return CoveragePart(kind=kind, reason=reason, parameters=parameters, layers=max(1, len(named)), named=named)


def partly_refused(
    engine: Engine, root: Path | ArtifactFolder, tenant_id: str, document: dict[str, Any] = DOCUMENT
) -> str:
    """A job whose capacity was refused while its factors were done."""
    claim = claimed(engine, tenant_id, document)
    write_rows(engine, root, claim, ("factors",))
    attempt_writes.write_summary(engine, claim, Summarised(kind="factors", summary=plain(summary("factors"))))
    refused = RefusedAnalysis(
        kind="capacity",
        code="usage",
        message="layer `features.0` has no curvature; take `stabilisation.damping_mode: absolute`",
        pointer="/stabilisation",
        layer="features.0",
    )
    # as the supervisor has it: decoded from the child's line
    last = decode(encode(Finished(refused=(refused,))))
    assert isinstance(last, Finished)
    attempt_endings.finish(engine, claim, last)
    return claim.job_id


def noticed(engine: Engine, root: Path | ArtifactFolder, tenant_id: str) -> str:
    """A job that has cut texts, and left a field of its data and a file of its model unread."""
    claim = claimed(engine, tenant_id, DOCUMENT)
    write_rows(engine, root, claim)
    for kind in claim.kinds:
        attempt_writes.write_summary(engine, claim, Summarised(kind=kind, summary=plain(summary(kind))))
    unused = ("`id` of rows.jsonl", "file `generation_config.json`")
    said, reading = ("3 of 4 texts are longer than 12 tokens and are cut there",), Reading(columns={"text": "line"})
    last = decode(encode(Finished(unused=unused, notices=said, reading=reading)))
    assert isinstance(last, Finished)
    attempt_endings.finish(engine, claim, last)
    return claim.job_id


def write_rows(engine: Engine, root: Path | ArtifactFolder, claim: Claim, kinds: tuple[str, ...] | None = None) -> None:
    kinds = claim.kinds if kinds is None else kinds
    for ordinal, (name, module, n, m, count) in enumerate(LAYERS):
        A = spectrum(n, 3.0 / (ordinal + 1), 1.35, dead=n // 9 if n > 20 else 0)
        G = spectrum(m, 0.02 * (ordinal + 1), 1.8)
        for kind in kinds:
            attempt_writes.write_layer(engine, claim, layer_frame(row(kind, ordinal, name, module, count, A, G)))
        body = {"layer": name, "ordinal": ordinal, "form": "kronecker", "A": A, "G": G}
        artifact(engine, root, claim, f"spectra/{ordinal}.json", json.dumps(body).encode(), "application/json")
    for kind in kinds:
        attempt_writes.write_layer(engine, claim, layer_frame(declared(kind, len(LAYERS))))


def artifact(
    engine: Engine, root: Path | ArtifactFolder, claim: Claim, name: str, content: bytes, media_type: str
) -> None:
    folder = root if isinstance(root, ArtifactFolder) else ArtifactFolder(root)
    path = folder.attempt_dir(claim.job_id, claim.fence) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    uri = folder.publish(claim.tenant_id, claim.job_id, claim.fence, name, sha256=digest, size_bytes=len(content))
    frame = ArtifactWritten(name=name, sha256=digest, size_bytes=len(content), media_type=media_type)
    attempt_writes.write_artifact(engine, claim, frame, uri)


def memory_curve() -> dict[str, Any]:
    """Of a job on a device: 24 batches, then 7 layers."""
    marks = [("model", "before"), ("model", "after"), ("dry run", "before"), ("dry run", "after"), ("pass 1", "before")]
    marks += [("pass 1", "within")] * 24 + [("pass 1", "after")]
    marks += [(f"layer {ordinal}", moment) for ordinal in range(7) for moment in ("before", "after")]
    return {
        "format": "kronoscope-memory-curve/1",
        "device": "cuda",
        "planned_device_peak_bytes": 2 * 2**30,
        "planned_host_peak_bytes": 900 * 2**20,
        "measured_peak_bytes": 1_700_000_000,
        "plan_error": -0.2084,
        "stages": [
            {
                "stage": stage,
                "planned_seconds": 10.0,
                "measured_seconds": 12.5,
                "error_seconds": 0.25,
                "planned_device_bytes": 2 * 2**30,
                "measured_device_bytes": 1_700_000_000,
                "error_device_bytes": -0.2084,
                "planned_device_allocated_bytes": 2 * 2**30,
                "measured_device_allocated_bytes": 1_500_000_000,
                "error_device_allocated_bytes": -0.3015,
                "planned_host_bytes": 500 * 2**20,
                "measured_host_bytes": 550 * 2**20,
                "error_host_bytes": 0.1,
            }
            for stage in ("collection", "decomposition")
        ],
        "samples": [
            {
                "seconds": place * 0.5,
                "operation": operation,
                "moment": moment,
                "device_allocated_bytes": 10**9 if moment == "within" else 10**8 if place > 4 else 0,
                "device_reserved_bytes": 1_700_000_000 if place > 4 else 0,
                "host_bytes": 500_000_000 + place * 2_000_000,
            }
            for place, (operation, moment) in enumerate(marks)
        ],
    }


def row(
    kind: str, ordinal: int, name: str, module: str, count: int, A: Sequence[float], G: Sequence[float]
) -> LayerResult:
    return _row(kind, ordinal, name, module, count, tuple(A), tuple(G))


@cache
def _row(
    kind: str, ordinal: int, name: str, module: str, count: int, A: tuple[float, ...], G: tuple[float, ...]
) -> LayerResult:
    """The row, whose sums over all products take a quarter of a second for each job."""
    metrics: Any
    if kind == "capacity":
        products = [a * g for a in A for g in G]
        trace, square, top = sum(products), sum(p * p for p in products), max(products)
        damping = 1e-4 * trace / len(products)
        used = sum(p / (p + damping) for p in products)
        entropy = -sum(p / trace * math.log(p / trace) for p in products if p > 0)
        grid = [10.0 ** (half / 2) for half in range(-32, 5)]
        steps = [top * 10 ** (place / 2 - 16) for place in range(33)]
        counts = [sum(left < p <= right for p in products) for left, right in itertools.pairwise(steps)]
        metrics = CapacityMetrics(
            form="kronecker",
            dimension=len(products),
            approximate=False,
            no_spectrum=None,
            estimated=None,
            intervals=None,
            undefined={},
            trace=trace,
            frobenius_norm=math.sqrt(square),
            spectral_norm=top,
            stable_rank=square / top**2,
            participation_ratio=trace**2 / square,
            effective_rank=math.exp(entropy),
            rank=sum(p > 1e-7 * top for p in products),
            logdet=None,
            damping=damping,
            logdet_damped=sum(math.log(p + damping) for p in products),
            logdet_factored=sum(math.log(p + damping) for p in products) * 0.9,
            effective_dimension=used,
            effective_dimension_factored=used * 0.93,
            effective_dimension_share=used / len(products),
            kappa=None if min(A) <= 0 else top / min(products),
            kappa_damped=(top + damping) / (min(products) + damping),
            kappa_factored=1e4,
            kappa_clipped=1e6,
            trace_A=sum(A),
            trace_G=sum(G),
            effective_rank_A=None,
            effective_rank_G=None,
            quantiles=tuple(
                Quantile(level=level, value=sorted(products)[math.ceil(level * len(products)) - 1])
                for level in (0.1, 0.5, 0.9)
            ),
            density=SpectralDensity(
                edges=tuple(steps), counts=tuple(counts), below=sum(p <= steps[0] for p in products)
            ),
            decay=SpectralDecay(exponent=1.21, first_rank=10, last_rank=len(products) // 4, r_squared=0.98),
            top_eigenvalues=tuple(sorted(products, reverse=True)[:10]),
            effective_dimension_curve=EffectiveDimensionCurve(
                damping=tuple(grid),
                effective_dimension=tuple(sum(p / (p + value) for p in products) for value in grid),
            ),
            nested=None,
            convergence=tuple(
                Convergence(
                    metric=name,
                    examples=(224, 449, 898, 1797),
                    values=tuple(math.exp(entropy) * part for part in (0.6, 0.75, 0.88, 1.0)),
                    extrapolation=math.exp(entropy) * 1.12,
                    not_converged=True,
                )
                for name in ("effective_rank",)
            ),
            cross_check=None,
        )
    else:
        metrics = FactorsMetrics(
            form="kronecker",
            trace_A=sum(A),
            trace_G=sum(G),
            exact_trace=0.8 * sum(A) * sum(G),
            trace_ratio=1.25,
            shared_A_with=None,
            calls=1,
            nested=None,
        )
    return LayerResult(
        kind=kind,
        ordinal=ordinal,
        layer=name,
        module=module,
        status="covered",
        reason=None,
        parameters=(f"{name}.weight", f"{name}.bias"),
        parameter_count=count,
        metrics=metrics,
        record=record(A, G),
        observed=observed(0.004 + 0.003 * ordinal),
    )


def record(A: Sequence[float], G: Sequence[float]) -> LayerRecord:
    floor_a, floor_g = max(A) / 1e6, max(G) / 1e6
    blank: dict[str, Any] = dict.fromkeys(LayerRecord.__annotations__)
    return LayerRecord(
        **blank
        | {
            "in_dim": len(A),
            "out_dim": len(G),
            "branch": "eigendecomposition",
            "why": "the Woodbury branch is not part of this version",
            "lambda_A": 1e-4 * sum(A) / len(A),
            "lambda_G": 1e-4 * sum(G) / len(G),
            "lambda_A_relative": 1e-4,
            "lambda_G_relative": 1e-4,
            "kappa_max": 1e6,
            "kappa_A": max(A) / min(A) if min(A) > 0 else None,
            "kappa_G": max(G) / min(G),
            "clipped_A": sum(value < floor_a for value in A),
            "clipped_G": sum(value < floor_g for value in G),
            "update_freq": 1,
            "update_index": 29,
            "positions": 115_008,
            "terms": 1797,
            "world_size": 1,
            "fisher": "mc",
            "sharing": "expand",
            "samples": 1,
            "seed": 0,
            "passes": 1,
            "dtype": "float32",
            "factor_bytes": 4 * (len(A) ** 2 + len(G) ** 2),
            "digest_A": hashlib.sha256(repr([*A]).encode()).hexdigest(),
            "digest_G": hashlib.sha256(repr([*G]).encode()).hexdigest(),
        }
    )


def observed(seconds: float) -> Observed:
    return Observed(
        seconds=seconds,
        allocated_before_bytes=None,
        allocated_after_bytes=None,
        reserved_before_bytes=None,
        reserved_after_bytes=None,
        host_before_bytes=410_000_000,
        host_after_bytes=412_000_000,
        not_replayed=(),
        refused_rungs=(),
        factors_from=None,
        measured_peak_bytes=412_000_000,
    )


def declared(kind: str, ordinal: int, name: str = DECLARED[0]) -> LayerResult:
    blank: dict[str, Any] = dict.fromkeys(LayerRecord.__annotations__)
    return LayerResult(
        kind=kind,
        ordinal=ordinal,
        layer=name,
        module=DECLARED[1],
        status="declared",
        reason="no_gradient",
        parameters=(f"{name}.scale",),
        parameter_count=DECLARED[2],
        metrics=None,
        record=LayerRecord(**blank | {"branch": "declared", "why": "no_gradient"}),
        observed=observed(0.0),
    )


def coverage() -> Coverage:
    covered = sum(count for *_, count in LAYERS)
    return Coverage(
        trainable_parameters=covered + 1,
        covered_parameters=covered,
        declared_parameters=1,
        covered_share=covered / (covered + 1),
        layers_covered=len(LAYERS),
        layers_declared=1,
        reasons={"no_gradient": 1},
        gradient_identity=2.1e-7,
        examples_checked=6,
        looked_at=LookedAt(signatures=5, glances=5, full=4),
        parts=(
            part("block", None, covered),
            part("not_covered", "no_gradient", 1, NamedParameters(names=DECLARED[:1], module=DECLARED[1], why=None)),
        ),
    )


def summary(kind: str) -> CapacitySummary | FactorsSummary:
    if kind == "factors":
        return FactorsSummary(
            coverage=coverage(),
            layers=len(LAYERS),
            branches={"eigendecomposition": len(LAYERS)},
            eigendecompositions=0,
            woodbury_layers=0,
            examples=1797,
            updates=29,
            passes=1,
            fisher="mc",
            sharing="expand",
            update_freq=1,
            factor_bytes=733_912,
            dense_factor_bytes=733_912,
        )
    return CapacitySummary(
        coverage=coverage(),
        layers=len(LAYERS),
        branches={"eigendecomposition": len(LAYERS)},
        eigendecompositions=14,
        dimension=31_764,
        trace=1.2837,
        effective_dimension=9218.4,
        effective_dimension_share=0.2902,
        effective_rank=412.7,
        logdet_damped=-412_833.2,
        damping=1e-4,
        damping_mode="relative",
        damping_split="pi",
        kappa_max=1e6,
        fisher="mc",
        sharing="expand",
        update_freq=1,
        identity_layers=(),
        not_converged={"effective_rank": 7, "trace": 0},
        token_importance=None,
        cross_check=None,
        model=model(),
    )


def model() -> ModelCapacity:
    """All layers together; the curve is one of a made-up shape."""
    blank: dict[str, Any] = dict.fromkeys(ModelCapacity.__annotations__)
    grid = [10.0 ** (half / 2) for half in range(-32, 5)]
    edges = [0.06 * 10 ** (place / 2 - 16) for place in range(33)]
    return ModelCapacity(
        **blank
        | {
            "no_spectrum": (),
            "estimated": (),
            "intervals": None,
            "undefined": {},
            "approximate": (),
            "trace_shares": tuple(TraceShare(layer=name, trace=0.1, share=1 / len(LAYERS)) for name, *_ in LAYERS),
            "participation_ratio": 31.4,
            "effective_rank": 215.3,
            "stable_rank": 7.9,
            "spectral_norm": 0.06,
            "kappa_damped": 6e5,
            "rank": 29_144,
            "quantiles": (Quantile(level=0.5, value=1.3e-7),),
            "density": SpectralDensity(
                edges=tuple(edges),
                counts=tuple(int(3000 * math.exp(-((k - 17) ** 2) / 40)) for k in range(32)),
                below=2620,
            ),
            "decay": SpectralDecay(exponent=1.43, first_rank=10, last_rank=7286, r_squared=0.991),
            "top_eigenvalues": (TopEigenvalue(value=0.06, layer="features.0"),),
            "effective_dimension_curve": EffectiveDimensionCurve(
                damping=tuple(grid), effective_dimension=tuple(31_764 / (1 + (value / 1e-7) ** 0.6) for value in grid)
            ),
        }
    )


def divided(engine: Engine, tenant_id: str, count: int, **changes: Any) -> tuple[str, list[Claim]]:
    """A job that waits for `count` pieces of 16 examples each, and the claims of their workers."""
    parent = claimed(engine, tenant_id, DOCUMENT | {"name": "digits", "shards": count} | changes)
    pieces = tuple(
        plain(Piece(round="collect", index=each, count=count, begin=16 * each, end=16 * (each + 1), total=16 * count))
        for each in range(count)
    )
    assert divide(engine, parent, Divided(round="collect", pieces=pieces)) == "waiting"
    taken_by = []
    for each in read_pieces(engine, tenant_id, parent.job_id):
        taken = claims.claim(engine, each.id, "node-7:4711", secrets.token_hex(8), 3600)
        assert taken is not None
        taken_by.append(taken)
    return parent.job_id, taken_by
