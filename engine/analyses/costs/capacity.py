"""Capacity, its bytes and seconds: one layer's metrics at a time, and the cross-check's vectors of P bytes each.

P are the covered parameters; the vectors stand beside the graph of a slice.
"""

from dataclasses import replace

from catalog.analyses.capacity import CapacityParams
from engine.collection.probe import Probe
from engine.factors.diagonal_update import NODES, PANELS
from engine.factors.representation_bytes import capacitance_bytes, gram_bytes
from engine.factors.softmax_fisher import DENSE_ROWS
from engine.layers.layer import TreatedLayer
from engine.linalg.lanczos import PANEL_BYTES
from engine.memory.plan import BUDGETED, Term
from engine.planning.analysis_cost import Cost, PlannedJob
from engine.planning.collection.seconds import Work

_STAGE, _CHECK = "capacity", "cross_check"
_PRODUCTS = 2 * 8 * 2**18
"""A few chunks of products of two spectra, in float64."""
_DERIVATIVES = 3
"""Graphs of a slice that stand at once where gradients are differentiated again."""
_STARTS_A_LAYER, _STARTS_AN_EIGENVALUE = 400, 1.6
"""Metrics of one layer, whose spectra are paired at few nodes, in starts of operations."""
_OF_A_PRODUCT = 14
"""Times the operations of a forward pass: a gradient, its own gradient, and one more."""
_AT_ONCE = 8
_SHORT_BASIS = 8
_SHORTEST_BASIS = 3
"""Lanczos vectors: two Ritz vectors and what comes next."""


def capacity_cost(params: CapacityParams, job: PlannedJob) -> Cost:
    """Return the bytes and the seconds of the metrics, and of the cross-check where it is asked for."""
    probe, place, terms = job.probe, job.place, job.carried(_STAGE)
    spectra = sum(16 * layer.groups * (layer.in_dim + layer.out_dim) for layer in probe.layers)
    terms.append(Term("spectra", "2 · Σ (in + out) · 8", spectra, "host", _STAGE))
    terms.append(Term("products", "2 chunks of 2¹⁸ · 8", _PRODUCTS, "host", _STAGE, source="estimated"))
    for layer in probe.layers:
        terms += job.read_back(layer, _STAGE, copies=int(job.passes > 1))
        each = probe.kept(layer)
        if each.kind == "softmax_head":
            size = capacitance_bytes(each.rows, layer.out_dim)
            terms.append(Term("capacitance", "2 · T² · 8, and chunks", size, place, _STAGE, layer.name))
        elif each.kind == "diagonal_sketch" and each.rank:
            size = gram_bytes(2 * each.rank, layer.out_dim)
            terms.append(Term("Gram matrix", "4 · (2r)² · 8, and chunks", size, place, _STAGE, layer.name))
    blocks = sum(layer.groups for layer in probe.layers)
    values = sum(layer.groups * (layer.in_dim + layer.out_dim) for layer in probe.layers)
    starts = _STARTS_A_LAYER * (1 + blocks) + _STARTS_AN_EIGENVALUE * values
    seconds = {_STAGE: starts * job.work.pace.seconds_an_operation}
    seconds[_STAGE] += sum(_without_spectrum(layer, probe, job.work) for layer in probe.layers)
    if params.cross_check is not None:
        terms += _cross_check(params, job)
        seconds[_CHECK] = _cross_check_seconds(job.work, params, blocks)
    return Cost(terms=tuple(terms), seconds=seconds)


def _cross_check(params: CapacityParams, job: PlannedJob) -> list[Term]:
    cuda, budget = job.place == "device", job.budget
    terms = job.carried(_CHECK, bases=False)
    free = budget.device_bytes if cuda else budget.host_bytes
    free -= job.stage_bytes(job.place, _CHECK, terms)
    vector = sum(layer.parameter_count for layer in job.probe.layers) * job.probe.dtype.itemsize
    several = probes_at_once(params.cross_check_probes, vector, free)
    for each in job.plan.terms:
        if each.stage == "collection" and each.name in ("activations", "outputs"):
            copies = _DERIVATIVES if params.cross_check_iterations else 1
            formula = f"{copies} · ({each.formula})" if copies > 1 else each.formula
            size = copies * each.size_bytes
            terms.append(replace(each, stage=_CHECK, size_bytes=size, formula=formula, source="estimated"))
    held = {place: job.stage_bytes(place, _CHECK, terms) for place in BUDGETED}
    probing = (2 * several + 2) * vector
    ways = [(probing if cuda else 0, 0 if cuda else probing, f"(2 · {several} + 2) · P, {several} probes at once")]
    if params.cross_check_iterations:
        searches = [
            (*search_bytes(length, vector, on_device=on_device, cuda=cuda), f"{length} Lanczos vectors of P")
            for length in search_lengths(params.cross_check_iterations)
            for on_device in ((True, False) if cuda else (False,))
        ]
        fitting = [
            each
            for each in searches
            if held["device"] + each[0] <= budget.device_bytes and held["host"] + each[1] <= budget.host_bytes
        ]
        ways.append(fitting[0] if fitting else min(searches, key=lambda each: each[0] + each[1]))
    for at, place in enumerate(BUDGETED):
        most = max(ways, key=lambda way: int(way[at]))
        if most[at]:
            terms.append(Term("vectors", most[2], int(most[at]), place, _CHECK))
    return terms


def _without_spectrum(layer: TreatedLayer, probe: Probe, work: Work) -> float:
    """Return the seconds of a G that answers shift by shift: two Gram matrices and a factorisation at each."""
    each, size = probe.kept(layer), layer.out_dim
    if each.kind == "diagonal_sketch":
        rows = each.gram_rows(size)
    else:
        rows = each.rows if each.kind == "softmax_head" and size > DENSE_ROWS else 0
    if not rows:
        return 0.0
    # one triangle of each Gram matrix; in float64 a product takes twice as long
    operations = 4 * size * rows**2 + 5 * rows**3
    return layer.groups * PANELS * NODES * operations / work.pace.operations_per_second


def _cross_check_seconds(work: Work, params: CapacityParams, blocks: int) -> float:
    # as far as one probe at a time: how many fit is seen when the collection is done
    forward = work.passing / 2 / max(1, (1 + work.directions) / 2)
    each = params.cross_check_probes * 3 * forward
    each += params.cross_check_iterations * (blocks + 1) * _OF_A_PRODUCT * forward
    return work.examples * each / work.pace.operations_per_second


def probes_at_once(probes: int, vector_bytes: int, free_bytes: int) -> int:
    """Return how many probes one pass takes, 1 to 8, in a quarter of the free bytes; a slice's graph stands beside."""
    return max(1, min(probes, _AT_ONCE, free_bytes // max(8 * vector_bytes, 1)))


def search_lengths(iterations: int) -> tuple[int, ...]:
    """Return up to three lengths of a Lanczos basis that are tried, the longest first, none above ``iterations``."""
    return tuple(dict.fromkeys(min(iterations, longest) for longest in (iterations, _SHORT_BASIS, _SHORTEST_BASIS)))


def search_bytes(length: int, vector_bytes: int, *, on_device: bool, cuda: bool) -> tuple[int, int]:
    """Return the bytes of the Lanczos bases of all layers and of the whole model, on the device and on the host.

    Beside the bases there are, for each, its start, its sum and what is gathered for it, two P (``vector_bytes``)
    each; and the gradients of the whole model, with what differentiates them, three P.
    """
    around = 9
    # rows of a basis that is restarted, in float64
    widened = min(PANEL_BYTES, 2 * length * vector_bytes)
    if not cuda:
        return 0, (2 * length + around) * vector_bytes + widened
    if on_device:
        return (2 * length + around) * vector_bytes + widened, 0
    # the vectors that are multiplied visit the device
    return (around + 1) * vector_bytes, (2 * length + 4) * vector_bytes + widened
