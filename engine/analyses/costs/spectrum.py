"""Spectrum, its bytes and seconds: vectors of P covered parameters, beside the graph of a slice.

Of an exact curvature these are kept from pass to pass

    basis        the vectors of the search for the eigenvalues at the ends, as many as ``length``
    quadrature   of each probe every vector so far, which the next is made orthogonal to
    trace        the vectors of the trace's estimate and what is kept of their products

and beside them, the most of

    forward      the graph of a slice, and of each column three vectors and the tangents of what is in use
    backward     of each column six vectors, as its product is pulled back and entered; of the Hessian three graphs too
    taking in    the products twice, and what one part of the search makes of them in float64

The basis is as long as half of what is free allows, and the columns as many as the other half does; both are chosen
once and done again by every later attempt, as rounding depends on them.
"""

from collections.abc import Iterator

import torch

from catalog.analyses.spectrum import SpectrumParams
from engine.collection.probe import Probe
from engine.linalg.panels import PANEL_NUMBERS
from engine.memory.plan import Term
from engine.planning.analysis_cost import Cost, PlannedJob

_STAGE = "spectrum"
SEARCH_WIDTH = 8
"""Vectors that the search for the eigenvalues at the ends multiplies at once, at most."""
_SHARE = 0.5
"""Share of the free bytes for the bases; the rest is for the columns of a pass."""
_FORWARD, _BACK, _SECOND_BACK = 3.3, 6.3, 5.3
"""Vectors that a column holds as its tangent goes forward, and as its product is pulled back, measured."""
_GRAPHS = 3
"""Graphs of a slice that stand at once where gradients are differentiated again."""
_STARTS_A_LAYER = 500
"""Starts of operations for a row."""
_FIRST, _SECOND = 8, 18
"""Times the operations of a forward pass that a column takes: a tangent and a pullback; a gradient's own gradient."""
_FIRST_STARTED, _SECOND_STARTED = 100, 200
"""Operations that a column starts for each call of a layer, on its way forward and back."""
_REREAD, _REREAD_AGAIN = 4, 8
"""Times that a basis is read for each product: two projections, there and back; and again where much cancels."""


def choose_search(params: SpectrumParams, size: int, dtype: torch.dtype, free_bytes: int) -> dict[str, int]:
    """Choose the search's ``length`` and the ``columns`` of a pass: the largest of a few that fit, or the smallest."""
    vector = max(size * dtype.itemsize, 1)
    tried, columns = _lengths(params, size), asked_at_once(params)
    kept = {length: sum(each for _, _, each in _kept(params, size, length, dtype)) for length in tried}
    length = next((length for length in tried if kept[length] <= _SHARE * free_bytes), tried[-1])
    while columns > 1 and columns * _BACK * vector > (1 - _SHARE) * free_bytes:
        columns //= 2
    return {"length": length, "columns": columns}


def _lengths(params: SpectrumParams, size: int) -> list[int]:
    """Basis vectors that are tried, the longest first: all that the products make, or a few times the wanted ones."""
    wanted = _wanted(params)
    least = min(size, wanted + 4)
    tried = [params.most_products + SEARCH_WIDTH, 8 * wanted, 4 * wanted, 2 * wanted + 8, least]
    return sorted({max(min(each, size), least) for each in tried}, reverse=True)


def asked_at_once(params: SpectrumParams) -> int:
    """Return how many products a search asks for at a time, at most."""
    probes = params.probes if params.density else 0
    return max(1 + probes + _trace_asked(params), SEARCH_WIDTH)


def _trace_asked(params: SpectrumParams) -> int:
    """Vectors of the trace in a pass: half of its products, of Hutch++ in its second pass two thirds."""
    if params.trace == "none":
        return 0
    return params.trace_products // 2 if params.trace == "xtrace" else 2 * (params.trace_products // 3)


def _kept(params: SpectrumParams, size: int, length: int, dtype: torch.dtype) -> Iterator[tuple[str, str, int]]:
    """Name, formula and bytes of what is kept from pass to pass."""
    rows = min(size, length) + 2
    yield "basis", f"{rows} · P", rows * size * dtype.itemsize
    if params.density:
        steps = min(params.steps, size)
        yield "quadrature", f"{params.probes} · {steps} · P", params.probes * steps * size * dtype.itemsize


def _ways(params: SpectrumParams, probe: Probe, columns: int, length: int, passing: tuple[int, int]) -> dict[str, int]:
    """Bytes beside what is kept, in words and number, each while it lasts; ``passing``: the graph and a tangent."""
    size, item = sum(layer.parameter_count for layer in probe.layers), probe.dtype.itemsize
    vector, (graph, tangent) = size * item, passing
    trace = min(_trace_asked(params), 2 * size)
    ways = {}
    if set(params.exact) - {"hessian"}:
        forward = graph + int(columns * (_FORWARD * vector + tangent))
        ways["slice · saved + columns · (3 P + slice · widest)"] = 2 * trace * vector + forward
        ways["columns · 6 P"] = 2 * trace * vector + int(columns * _BACK * vector)
    if "hessian" in params.exact:
        second = _GRAPHS * graph + int(columns * _SECOND_BACK * vector)
        ways["3 · slice · saved + columns · 5 P"] = 2 * trace * vector + second
    if trace:
        factorised = trace if params.trace == "xtrace" else trace // 2
        ways["taking in the trace's"] = (2 * columns + 2 * trace) * vector + 6 * factorised * size * 8
    rows = min(size, length) + 2
    panel = 8 * min(PANEL_NUMBERS, min(rows, params.most_products) * size)
    widest = 2 * SEARCH_WIDTH * size
    ways["taking in the search's"] = widest * item + max(widest * 8, panel) + 10 * rows * rows * 8
    if params.density:
        panel = 8 * min(PANEL_NUMBERS, params.probes * min(params.steps, size) * size)
        ways["taking in the density's"] = 2 * (1 + params.probes) * vector + max(2 * params.probes * size * 8, panel)
    return ways


def spectrum_cost(params: SpectrumParams, job: PlannedJob) -> Cost:
    """Return the bytes and the seconds of the spectrum, and the choice of its search."""
    probe, workspace, place = job.probe, job.workspace, job.place
    terms, seconds = job.carried(_STAGE), {_STAGE: _seconds(params, job)}
    if "kfac" in params.curvatures:
        spectra = sum(16 * layer.groups * (layer.in_dim + layer.out_dim) for layer in probe.layers)
        terms.append(Term("spectra", "2 · Σ (in + out) · 8", spectra, "host", _STAGE))
        terms.append(Term("products", "4 chunks of 2¹⁷ · 8", 4 * 8 * 2**17, "host", _STAGE, source="estimated"))
    if not params.exact:
        return Cost(terms=tuple(terms), seconds=seconds)
    size = sum(layer.parameter_count for layer in probe.layers)
    graph = sum(
        each.size_bytes
        for each in job.plan.terms
        if each.stage == "collection" and each.name in ("activations", "outputs") and each.place == place
    )
    budget = job.budget.device_bytes if place == "device" else job.budget.host_bytes
    free = budget - job.stage_bytes(place, _STAGE, terms)
    earlier = workspace.resume.chosen
    chosen = dict(earlier.search) if earlier is not None and earlier.search else None
    if chosen is None:
        chosen = choose_search(params, size, probe.dtype, max(free - _GRAPHS * graph, 0))
    for name, formula, bytes_ in _kept(params, size, chosen["length"], probe.dtype):
        terms.append(Term(name, formula, bytes_, place, _STAGE))
    columns = min(chosen["columns"], asked_at_once(params))
    widest = max((call.entered.numel() + call.output.numel() for call in probe.calls), default=0)
    examples = job.plan.chosen.micro_batch or workspace.options.collection.batch_size
    tangent = int(widest * examples / probe.examples) * probe.dtype.itemsize
    ways = _ways(params, probe, columns, chosen["length"], (graph, tangent))
    most = max(ways, key=lambda way: ways[way])
    terms.append(Term("a pass", f"{columns} columns: {most}", ways[most], place, _STAGE, source="estimated"))
    return Cost(terms=tuple(terms), seconds=seconds, chosen={"search": chosen})


def _seconds(params: SpectrumParams, job: PlannedJob) -> float:
    work, probe = job.work, job.probe
    seconds = _STARTS_A_LAYER * work.pace.seconds_an_operation * sum(layer.groups for layer in probe.layers)
    forward = work.passing / 2 / max(1, (1 + work.directions) / 2)
    batches = -(-work.examples // work.batch)
    # the values and gradients that all columns of a pass share cost as much as one more
    columns = _searched(params) + _sampled(params) + expected_passes(params)
    for of in params.exact:
        second = of == "hessian"
        operations = work.examples * columns * forward * (_SECOND if second else _FIRST)
        started = batches * columns * work.calls * (_SECOND_STARTED if second else _FIRST_STARTED)
        seconds += operations / work.pace.operations_per_second + started * work.pace.seconds_an_operation
    # the host adds what it widens, which takes as long as adding what arrives
    widened = work.pace.held_bytes_per_second if job.place == "device" else work.pace.bytes_per_second
    return seconds + len(params.exact) * _reread_bytes(params, probe) / widened


def _reread_bytes(params: SpectrumParams, probe: Probe) -> float:
    """Bytes of bases that the searches of one curvature read, in float64 as they are projected."""
    size = sum(layer.parameter_count for layer in probe.layers)
    searched = _searched(params)
    steps = min(params.steps, size) if params.density else 0
    # a basis is half as long on average as at the end
    rows = _REREAD_AGAIN * searched * min(searched, size) + _REREAD * params.probes * steps * steps
    return 8.0 * size * rows / 2


def _wanted(params: SpectrumParams) -> int:
    return params.count * (2 if params.end == "both" else 1)


def _searched(params: SpectrumParams) -> int:
    """About how many products the search for the eigenvalues at the ends makes."""
    return min(params.most_products, 6 * _wanted(params) + 40)


def _sampled(params: SpectrumParams) -> int:
    """Products of the density and of the trace."""
    density = params.probes * params.steps if params.density else 0
    return density + (params.trace_products if params.trace != "none" else 0)


def expected_passes(params: SpectrumParams) -> int:
    """Return about how many passes over the data a search makes, where all columns go through at once."""
    return max(params.steps if params.density else 0, _searched(params))
