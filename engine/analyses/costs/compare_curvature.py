"""Compare curvature, its bytes and seconds: two factors at a time, each decomposed, and their pencils.

All of it is computed on the host in float64. Of the second set nothing is known before it is read: it is counted as
large as the first, whose layers it is compared with.
"""

from functools import partial

import torch

from catalog.analyses.compare_curvature import CompareCurvatureParams
from engine.collection.probe import Probe, read_back_bytes
from engine.layers.layer import TreatedLayer
from engine.linalg.eigendecomposition import rungs
from engine.memory.device_speed import typical_speed
from engine.memory.plan import Term
from engine.operators.comparison import MOST_PRODUCTS
from engine.planning.analysis_cost import Cost, PlannedJob

_STAGE = "compare_curvature"
_HOST = torch.device("cpu")
_term = partial(Term, place="host", stage=_STAGE, source="estimated")
_STARTS_A_LAYER = 2000
"""Starts of operations for one layer, whatever its size."""
_PANELS = 8 * 2 * 2**20
"""Rows of two factors and of their difference, in float64."""
_PRODUCT_BYTES = 40
"""Bytes of each eigenvalue of G ⊗ A that is put into order: both sets' products, in order, and their places."""
_OPERATIONS = 2 * 9 + 2 * 5 + 2 * 3
"""n³: two decompositions with vectors, the eigenvalues of two pencils, and what brings these about."""


def comparison_cost(params: CompareCurvatureParams, job: PlannedJob) -> Cost:
    """Return the bytes and the seconds of the comparison."""
    probe, kept = job.probe, job.stored
    terms = job.carried(_STAGE)
    terms.append(_term("panels", "8 · 2 MiB", _PANELS))
    most = params.k[-1]
    shared = sum(8 * min(most, layer.in_dim) ** 2 for layer in probe.layers if layer.name in probe.shared)
    if shared:
        terms.append(_term("cosines", "k² · 8, of each A that layers share", shared))
    held = job.stage_bytes("host", _STAGE, terms)
    copies = 2 if job.passes > 1 else 1
    for layer in probe.layers:
        read = copies * read_back_bytes(layer, probe, kept)
        formula = "in² + out² of both sets, as kept" if copies > 1 else "in² + out² of the second set, as kept"
        terms.append(_term("read back", formula, read, layer=layer.name))
        leading = sum(2 * 8 * side * min(most, side) for side in (layer.in_dim, layer.out_dim))
        terms.append(_term("eigenvectors", "2 · (in + out) · k · 8", leading, layer=layer.name))
        room = job.budget.host_bytes - held - read
        working = max(_side_bytes(side, rows, kept, room) for side, rows in _sides(layer, probe))
        products = layer.in_dim * layer.out_dim
        if products <= MOST_PRODUCTS:
            working = max(working, _PRODUCT_BYTES * products)
        formula = "of one factor; 3 · n² · 8 of a pencil; or 40 · in · out of the products in order"
        terms.append(_term("decompositions", formula, working, layer=layer.name))
    return Cost(terms=tuple(terms), seconds={_STAGE: _seconds(job)})


def _seconds(job: PlannedJob) -> float:
    pace = job.work.pace if job.place == "host" else typical_speed(_HOST)
    total = 0.0
    for layer in job.probe.layers:
        sides = _sides(layer, job.probe)
        # an A that layers share is compared once
        compared = sides[1:] if layer.name in job.probe.shared else sides
        for side, rows in compared:
            n = side if rows is None else min(side, 2 * rows)
            total += layer.groups * pace.eigen_seconds(_OPERATIONS * n**3, n)
        total += layer.groups * _STARTS_A_LAYER * pace.seconds_an_operation
    return total


def _sides(layer: TreatedLayer, probe: Probe) -> list[tuple[int, int | None]]:
    """Rows of A and of G as they are decomposed, 1 of a diagonal; with the gradient rows of a G that is kept so."""
    each = probe.kept(layer)
    rows = each.held_rows(layer.out_dim) if each.kind == "woodbury" else None
    sides: list[tuple[int, int | None]] = [(layer.in_dim if layer.form == "kronecker" else 1, None)]
    sides.append((1 if layer.form == "diagonal_block" or each.kind == "diagonal_sketch" else layer.out_dim, rows))
    return sides


def _side_bytes(size: int, rows: int | None, kept: torch.dtype, room: int) -> int:
    """Bytes of one factor's decomposition by the first solver that fits, or of its pencil."""
    spanned = 0
    if rows is not None:
        # both sets' rows in float64, thrice; what is decomposed has as many rows as they
        spanned, size = 24 * size * min(size, 2 * rows), min(size, 2 * rows)
    ladder = rungs(size, need="vectors", device=_HOST, dtype=torch.float64 if rows is not None else kept)
    fitting = [each.host_bytes for each in ladder if each.host_bytes <= room]
    decomposing = fitting[0] if fitting else min((each.host_bytes for each in ladder), default=0)
    return spanned + max(decomposing, 24 * size**2)
