"""`compression`: each side of a layer, or a matrix of the caller's, as a semiseparable structure with its error."""

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from catalog.analyses.analysis import LayerResult
from catalog.analyses.compression import (
    CompressedSide,
    CompressionMetrics,
    CompressionParams,
    CompressionSummary,
)
from catalog.responses.layer_record import Observed
from engine.analyses.layer_analysis import LayerAnalysis
from engine.factors.dense import as_operator
from engine.factors.factor_set import GIVEN_MATRIX, WHOLE_MATRIX
from engine.factors.kronecker_factors import Factors
from engine.factors.structure_files import KINDS, structure_digest, write_structure_index, write_structures
from engine.linalg.linear_operator import Operator
from engine.linalg.panels import frobenius_norm
from engine.measurement.layer_measurement import Measured
from engine.memory.plan import Term
from engine.planning.analysis_cost import Cost, KeptFiles, PlannedJob
from engine.semiseparable.choose import (
    Candidate,
    Choice,
    choose,
    default_order,
    largest_order,
    sss_candidate,
    tridiagonal_candidate,
)
from engine.semiseparable.construct_sss import OrderBeyond
from engine.semiseparable.fit import SWEEPS, TridiagonalFit
from engine.semiseparable.semiseparable_matrix import (
    SemiseparableMatrix,
    default_rank,
    level_ranks,
    require_rank,
)
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank

_BLOCK = 16
_STAGE = "compression"


@dataclass(frozen=True)
class _Made:
    side: CompressedSide
    matrix: SemiseparableMatrix | None


class Compression(LayerAnalysis[CompressionParams]):
    """Structures of each layer's sides; a layer that shares an A names the one that holds it.

    Memory:
        One layer's factors, three copies of the larger side in float32 or wider, and the candidates.
    """

    kind = "compression"

    @override
    def prepare(self) -> None:
        self._made: list[CompressedSide] = []
        self._entries: list[dict[str, Any]] = []

    @override
    def layer(self, layer: Measured) -> CompressionMetrics:
        facts = layer.facts
        factors = self.whole.load(facts.ordinal)
        made = {"G": self._compressed(self._gradient_side(layer, factors))}
        if facts.shared_A_with is None and facts.form not in ("block", "diagonal_block"):
            made = {"A": self._compressed(factors.side_A)} | made
        self._made += [each.side for each in made.values()]
        held = {name: each.matrix for name, each in made.items() if each.matrix is not None}
        artifact = None
        if held:
            entry = write_structures(self.workspace.ports.artifacts, facts.name, facts.ordinal, held)
            self._entries.append(entry)
            artifact = entry["file"]
        return CompressionMetrics(
            form=facts.form,
            A=made["A"].side if "A" in made else None,
            G=made["G"].side,
            shared_A_with=None if facts.shared_A_with is None else self.whole.layers[facts.shared_A_with].name,
            artifact=artifact,
        )

    def _gradient_side(self, layer: Measured, factors: Factors) -> Operator:
        source = self.workspace.inputs.stored
        if layer.facts.module == GIVEN_MATRIX and source is not None:
            # beside analyses that need a symmetric one, the mean of its triangles is all there is
            with contextlib.suppress(FileNotFoundError):
                matrix = source.load_tensors(WHOLE_MATRIX)["matrix"]
                for name in ("rank", "order"):
                    # of a model's sides some may have fewer rows; these are dense then
                    require_rank(getattr(self.params, name) or 1, matrix.shape[0], name)
                return as_operator(matrix)
        return factors.side_G

    def _compressed(self, side: Operator) -> _Made:
        if side.kind != "dense":
            return _as_it_is(side.size, side.kind, f"it is kept as `{side.kind}`, and is not a dense matrix")
        if side.is_diagonal:
            return _as_it_is(side.size, "diagonal", "it is diagonal")
        dense = side.widened().to(self.workspace.machine.device)
        choice = self._choice(dense)
        chosen = choice.chosen
        if chosen is None:
            return _Made(_dense_side(dense, choice.why), None)
        structure = chosen.matrix.to("cpu")
        report = structure.memory_usage()
        bound = getattr(structure, "error_bound", None)
        norm = frobenius_norm(dense)
        return _Made(
            CompressedSide(
                size=dense.shape[0],
                structure=structure.kind,
                why=choice.why,
                relative_error=chosen.relative_error,
                error_bound=None if bound is None else bound / norm if norm > 0 else 0.0,
                total_bytes=structure.size_bytes,
                dense_bytes=dense.nbytes,
                tridiagonal_bytes=report.get("tridiagonal_bytes"),
                lowrank_bytes=report.get("lowrank_bytes"),
                memory_reduction_vs_dense=report["memory_reduction_vs_dense"],
                memory_reduction_vs_fp32=report.get("memory_reduction_vs_fp32"),
                total_rank=report.get("total_rank"),
                ranks_per_level=tuple(report["ranks_per_level"]) if "ranks_per_level" in report else None,
                largest_order=report["orders"]["largest"] if "orders" in report else None,
                block=report.get("block"),
                digest=structure_digest(structure),
            ),
            structure,
        )

    def _choice(self, dense: Tensor) -> Choice:
        """The structure by the options: the one that they name, or the one that measures best."""
        params, n, sweep = self.params, dense.shape[0], self.workspace.ports.raise_if_cancelled
        if params.structure == "auto" or (params.structure == "tridiagonal_lowrank" and params.tolerance is not None):
            kinds = tuple(KINDS) if params.structure == "auto" else (TridiagonalLowRank.kind,)
            return choose(dense, tolerance=params.tolerance, rank=params.rank, kinds=kinds, after_sweep=sweep)
        if params.structure == "block_sss":
            block = min(params.block or _BLOCK, n)
            order = params.order or (None if params.tolerance is not None else default_order(n, block))
            order = None if order is None else min(order, n)
            most = largest_order(n, block)
            try:
                found = sss_candidate(dense, block, order=order, tolerance=params.tolerance, most_order=most)
            except OrderBeyond:
                why = f"dense: an order above {most} would be needed for a relative error of {params.tolerance:g}"
                return Choice(chosen=None, why=why, losers=())
        else:
            rank = min(params.rank or default_rank(n), n)
            levels = level_ranks(n, params.num_levels) if params.use_hierarchical else rank
            narrow = torch.float16 if params.use_mixed_precision else None
            found = tridiagonal_candidate(TridiagonalFit(dense, sweep), levels, lowrank=narrow)
        return _if_it_pays(found, dense)

    @override
    def _row(self, layer: Measured, metrics: object, observed: Observed) -> LayerResult:
        row = super()._row(layer, metrics, observed)
        # a matrix of the caller's own is not a curvature: its trace may be anything
        return replace(row, status="covered") if layer.facts.module == GIVEN_MATRIX else row

    @override
    def finish(self) -> None:
        write_structure_index(self.workspace.ports.artifacts, self._entries)

    @override
    def summary(self) -> CompressionSummary:
        sides = [side for side in self._made if side.total_bytes is not None and side.dense_bytes is not None]
        total, dense = (sum(getattr(side, name) for side in sides) for name in ("total_bytes", "dense_bytes"))
        counts: dict[str, int] = {}
        for side in sides:
            counts[side.structure] = counts.get(side.structure, 0) + 1
        return CompressionSummary(
            coverage=self.coverage,
            layers=len(self.whole.layers),
            sides=len(sides),
            structures=dict(sorted(counts.items())),
            total_bytes=total,
            dense_bytes=dense,
            saved_share=1 - total / dense if dense else None,
            relative_error=max((side.relative_error or 0.0 for side in sides), default=None),
        )

    @staticmethod
    @override
    def cost(params: CompressionParams, job: PlannedJob) -> Cost:
        terms, operations = job.carried(_STAGE), 0
        item = max(job.stored.itemsize, torch.float32.itemsize)
        for layer in job.probe.layers:
            sides = [layer.in_dim] if layer.form == "kronecker" and layer.name not in job.probe.shared else []
            if layer.form != "diagonal_block" and job.probe.kept(layer).kind == "dense":
                sides.append(layer.out_dim)
            terms += job.read_back(layer, _STAGE, copies=2)
            if not sides:
                continue
            n = max(sides)
            terms.append(Term("dense side", "3 · n², widened", 3 * n * n * item, job.place, _STAGE, layer.name))
            operations += layer.groups * sum(_operations(params, n) for n in sides)
        seconds = {_STAGE: operations / job.work.pace.operations_per_second}
        kept = KeptFiles(name="kept structures", formula="below the dense matrices", size_bytes=job.packed_bytes)
        return Cost(terms=tuple(terms), seconds=seconds, kept=(kept,))


def _operations(params: CompressionParams, n: int) -> int:
    """Floating-point operations for a side of n rows: sweeps from two starts, and the four sizes of SSS blocks."""
    r = params.rank or default_rank(n)
    fit = 0 if params.structure == "block_sss" else 2 * SWEEPS * 6 * r * n * n
    sss = 0 if params.structure == "tridiagonal_lowrank" else 4 * 2 * n * n * (_BLOCK + r)
    return fit + sss


def _as_it_is(size: int, kind: str, why: str) -> _Made:
    nothing: dict[str, Any] = dict.fromkeys(CompressedSide.__dataclass_fields__)
    known = {"size": size, "structure": kind, "why": f"it stays as it is: {why}", "relative_error": 0.0}
    return _Made(CompressedSide(**(nothing | known)), None)


def _dense_side(dense: Tensor, why: str) -> CompressedSide:
    nothing: dict[str, Any] = dict.fromkeys(CompressedSide.__dataclass_fields__)
    known = {"size": dense.shape[0], "structure": "dense", "why": why, "relative_error": 0.0}
    return CompressedSide(**(nothing | known | {"total_bytes": dense.nbytes, "dense_bytes": dense.nbytes}))


def _if_it_pays(found: Candidate, dense: Tensor) -> Choice:
    if found.size_bytes < dense.nbytes and math.isfinite(found.relative_error):
        return Choice(chosen=found, why=f"{found.name}, as asked", losers=())
    taken = f"{found.size_bytes:,} bytes at a relative error of {found.relative_error:.3g}"
    why = f"dense: {found.name} takes {taken}, and the dense matrix {dense.nbytes:,} bytes"
    return Choice(chosen=None, why=why, losers=(found,))
