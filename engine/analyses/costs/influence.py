"""Influence, its bytes and seconds: vectors of a block of queries, one layer solved at a time, and passes for scores.

A block holds its gradients, what has been solved, and the copies of a layer; the search of `ggn` its directions and
residuals too. Scores are held while a block is written.
"""

from catalog.analyses.influence import InfluenceParams
from engine.analyses.costs.natural_gradient import gradient_pass_terms
from engine.memory.plan import Term
from engine.planning.analysis_cost import Cost, KeptFiles, PlannedJob

_STAGE = "influence"
_OF_THE_SEARCH = 8
"""Vectors of P numbers for each query that conjugate gradients hold on the host, and two where products are made."""
_OF_A_PRODUCT = 3
"""Passes that a product with the Gauss-Newton matrix takes, beside one with a gradient."""


def influence_cost(params: InfluenceParams, job: PlannedJob) -> Cost:
    """Return the bytes and the seconds of the influence."""
    workspace, item = job.workspace, job.probe.dtype.itemsize
    query, trainable = workspace.inputs.query, job.parameter_bytes
    queries = params.block if query is None else query.examples or params.block
    block, work = min(params.block, queries), job.work
    # all of them, where a piece of a divided job collects some, or `update_freq` lets some enter
    examples = workspace.inputs.whole_examples or work.examples
    kept = item * queries * examples * (1 + len(params.groups))
    one, searched = block * trainable, params.of == "ggn"
    terms = [
        *job.carried(_STAGE),
        *gradient_pass_terms(job, trainable, _STAGE),
        Term("gradients of queries", "block · P", one, "host", _STAGE),
        Term("vectors of queries", "2 · block · P", 2 * one, job.place, _STAGE),
        Term("scores", "3 · block · examples · groups", 3 * kept * block // queries, "host", _STAGE),
    ]
    if searched:
        terms.append(Term("search", "8 · block · P", _OF_THE_SEARCH * one, "host", _STAGE))
        terms.append(Term("products", "2 · block · P", 2 * one, job.place, _STAGE))
    numbers = 0
    for layer in job.probe.layers:
        own = layer.in_dim * layer.out_dim
        size = 8 * (3 * block * own + layer.in_dim**2 + layer.out_dim**2)
        terms += job.read_back(layer, _STAGE, copies=1)
        terms.append(Term("solved", "8 · (3 · block · in · out + in² + out²)", size, job.place, _STAGE, layer.name))
        numbers += layer.groups * own
    passes = -(-queries // block)
    gradients = passes * examples + 2 * queries
    if searched:
        gradients += _OF_A_PRODUCT * params.iterations * queries * examples
    slices = passes * -(-examples // work.batch) + queries
    seconds = gradients * work.example_seconds + slices * work.slice_seconds
    seconds += 2 * queries * examples * numbers / work.pace.operations_per_second
    files = KeptFiles(name="scores", formula="queries · examples · groups", size_bytes=kept)
    return Cost(terms=tuple(terms), seconds={_STAGE: seconds}, kept=(files,))
