"""Head choice: whether the loss's head keeps the probabilities of its loss terms in place of G.

It does where they take less than G by the same count as gradient rows: up to ``(√2 − 1) V`` terms of V
classes, or V where every layer is to keep rows. Terms are counted before the pass, without the model,
until there are too many: a classifier of few classes is known by its first batch.
"""

from engine.curvature.layer_bytes import DryRun
from engine.curvature.layers.coverage import Survey
from engine.curvature.layers.layer import TreatedLayer
from engine.curvature.passes import PassJob
from engine.curvature.prediction import class_terms
from engine.curvature.representation import RATIO, Representation, of_rows


def head_choice(job: PassJob, survey: Survey, seen: DryRun) -> dict[str, Representation]:
    """How the head keeps its G, by its name; empty where it has no say."""
    layer = next((layer for layer in survey.treated if seen.head is not None and seen.head in layer.roles), None)
    most = 0 if layer is None else _most_terms(job, layer)
    if layer is None or most == 0:
        return {}
    terms = _terms(job, seen.outputs // (seen.examples * layer.out_dim), most)
    if not 0 < terms <= most:
        return {}
    labels = ", the mean over labels of what `mc` samples" if job.collection.fisher == "mc" else ""
    why = (
        f"its outputs are the logits of a cross-entropy: G is the exact Fisher of the softmax{labels}, kept as the "
        f"probabilities of {terms} loss terms over {layer.out_dim} classes"
    )
    kept = Representation(kind="softmax_head", why=why, rows=terms)
    return {layer.name: of_rows(kept, layer, job.workspace.woodbury, job.collection, job.dtype)}


def _most_terms(job: PassJob, layer: TreatedLayer) -> int:
    """Loss terms up to which ``layer`` keeps its probabilities; 0 where it never does."""
    options, collection, size = job.workspace.woodbury, job.collection, layer.out_dim
    if not options.softmax_head or options.policy == "dense" or collection.fisher not in ("mc", "type2"):
        return 0
    if options.policy == "auto" and job.workspace.examples is None:
        # as for gradient rows: where nobody says how many examples there are, nothing is foreseen
        return 0
    if collection.ekfac or (options.policy == "hybrid" and size < options.hybrid_from):
        return 0
    return int(RATIO * size) if options.policy == "auto" else size


def _terms(job: PassJob, each: int, most: int) -> int:
    """Loss terms of the data, of which an example has ``each`` where it does not say; or so many that it is enough."""
    if job.workspace.device.type == "meta":
        # shapes alone: every target counts
        examples = job.workspace.examples
        return most if examples is None else each * -(-examples // job.collection.update_freq)
    total = 0
    for place, batch in enumerate(job.stream()):
        if place % job.collection.update_freq == 0:
            total += class_terms(batch, job.task, each)
        if total > most:
            break
    return total
