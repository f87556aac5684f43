"""The plan's choice for a loss's head: the probabilities of its loss terms in place of G, or only its diagonal.

It does where they take less than G by the same count as gradient rows: up to ``(√2 − 1) V`` terms of V
classes, or V where every layer is to keep rows. Terms are counted before the pass, without the model,
until there are too many: a classifier of few classes is known by its first batch.

Above 46,340 classes no solver of a host takes a dense G, whatever the memory, so unless a device has the memory to
decompose it, it is never the choice of a head that has another one, in this order:

    terms ≤ (√2 − 1) V                the probabilities, exact
    `woodbury.approximate` (default)  a sketch of them, or of the gradients, with its bound
    terms ≤ V                         the probabilities, exact, at V T² operations for each question
    else                              a dense G, whose diagonal, trace and norm are all that is known of it

Gradient rows have a Gram matrix of as many rows, which no solver takes either beyond 46,340. Where `all` or `hybrid`
asks for so many and eigenvalues are wanted, the head is sketched where it may be, and the job refused where it may not.
"""

from dataclasses import dataclass, replace

from engine.collection.pass_job import PassJob
from engine.collection.probe import Probe, ProbedModel, sides_of
from engine.collection.ranks.turns import Turns
from engine.errors import BeyondSolvers
from engine.factors.representation import RATIO, Representation, of_rows
from engine.layers.coverage import Survey
from engine.layers.layer import TreatedLayer
from engine.linalg.eigensolvers import LARGEST
from engine.memory.plan import Plan, readable_bytes
from engine.model.outputs import class_terms
from engine.planning.decomposition_memory import is_beyond_solvers
from engine.planning.job_plan import Narrower, forecast, with_measured_seconds
from engine.workspace import Workspace


def head_choice(job: PassJob, survey: Survey, probe: Probe) -> dict[str, Representation]:
    """Return how the loss's head keeps its G, if it keeps the probabilities of its loss terms."""
    layer = next((layer for layer in survey.treated if probe.head is not None and probe.head in layer.roles), None)
    most = 0 if layer is None else _most_terms(job, layer)
    if layer is None or most == 0:
        return {}
    terms = _terms(job, probe.outputs // (probe.examples * layer.out_dim), most)
    if not 0 < terms <= most:
        return {}
    labels = ", the mean over labels of what `mc` samples" if job.collection.fisher == "mc" else ""
    why = (
        f"its outputs are the logits of a cross-entropy: G is the exact Fisher of the softmax{labels}, kept as the "
        f"probabilities of {terms} loss terms over {layer.out_dim} classes"
    )
    kept = Representation(kind="softmax_head", why=why, rows=terms, of_terms=True)
    return {layer.name: of_rows(kept, layer, job.workspace.options.woodbury, job.collection, job.dtype)}


def _most_terms(job: PassJob, layer: TreatedLayer) -> int:
    """Loss terms up to which ``layer`` keeps its probabilities; 0 where it never does."""
    options, collection, size = job.workspace.options.woodbury, job.collection, layer.out_dim
    if not options.softmax_head or options.policy == "dense" or collection.fisher not in ("mc", "type2"):
        return 0
    if options.policy == "auto" and job.workspace.inputs.foreseen_examples(job.workspace.machine.ranks) is None:
        # as for gradient rows: where the number of examples is not known, nothing is foreseen
        return 0
    if collection.ekfac or (options.policy == "hybrid" and size < options.hybrid_from):
        return 0
    if options.policy != "auto" or (size > LARGEST and not options.approximate):
        return size
    return int(RATIO * size)


def _terms(job: PassJob, each: int, most: int) -> int:
    """Loss terms of the data, of which an example has ``each`` where it does not say; or so many that it is enough."""
    if job.workspace.machine.device.type == "meta":
        # shapes alone: every target counts
        examples = job.workspace.inputs.foreseen_examples(job.workspace.machine.ranks)
        return most if examples is None else each * -(-examples // job.collection.update_freq)
    total = 0
    # a part keeps its head as the whole does
    turns = Turns.of(job.workspace.machine.ranks, job.collection.update_freq)
    for place, batch in enumerate(job.whole_stream()):
        if turns.update(place) is not None:
            total += class_terms(batch, job.task, each)
        if total > most:
            break
    return sum(job.workspace.machine.ranks.gather(total, "loss terms"))


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A probed model with the plan that was chosen for it."""

    probed: ProbedModel
    plan: Plan
    less: Narrower | None
    """The same job with less of its head's G, where that is possible."""


def choose_plan(workspace: Workspace, probed: ProbedModel) -> PlannedJob:
    """Choose the fastest way that fits, with less of a head whose G does not fit.

    A later attempt does what the first one did, whatever is free by then. The plan may not fit; the probe that comes
    with it has the representations that it counts on. ``BeyondSolvers`` if EK-FAC needs eigenvectors that there is no
    way to compute, or eigenvalues are wanted of more gradient rows than solvers take.
    """
    plan = forecast(workspace, probed.probe)
    _require_bases(probed.job, probed.survey)
    planned = _with_narrower_head(workspace, probed, plan)
    _require_solvable_rows(planned.probed)
    return replace(planned, plan=with_measured_seconds(workspace, planned.probed.probe, planned.plan))


def _with_narrower_head(workspace: Workspace, probed: ProbedModel, plan: Plan) -> PlannedJob:
    """Take the sketch of a head whose G does not fit, or that an earlier attempt took."""
    job = probed.job
    unchanged = PlannedJob(probed=probed, plan=plan, less=_narrower(job, probed.survey, probed.probe, plan))
    less, earlier = unchanged.less, job.workspace.resume.chosen
    if less is None:
        return unchanged
    beyond = _beyond_solvers(job, probed.probe, less.layer)
    if earlier is None and plan.fits(job.workspace.machine.budget) and not beyond:
        return unchanged
    narrow = forecast(workspace, less.probe)
    if earlier is None and not beyond and not narrow.fits(job.workspace.machine.budget):
        # the head is not what is too large
        return unchanged
    chosen = replace(narrow.chosen, sketched=(less.layer,))
    return PlannedJob(
        probed=probed.with_probe(less.probe),
        plan=replace(narrow, chosen=chosen, why=f"{narrow.why}; {less.why}"),
        less=less,
    )


def _require_bases(job: PassJob, survey: Survey) -> None:
    """Refuse EK-FAC, whose passes need every eigenvector, where a factor has more rows than eigensolvers take."""
    if not job.collection.ekfac:
        return
    for layer in survey.treated:
        rows = max((size for size, dense in sides_of(layer, follows=False) if dense), default=0)
        if rows > LARGEST:
            raise BeyondSolvers(
                "`collection.ekfac` needs the eigenvectors of every factor, and eigensolvers take at most "
                f"{LARGEST} rows: layer `{layer.name}` has one of {rows}; leave `collection.ekfac` out",
                layer=layer.name,
                pointer="/collection/ekfac",
            )


def _require_solvable_rows(probed: ProbedModel) -> None:
    """Refuse gradient rows of which eigenvalues are wanted, and that are, or may be, more than eigensolvers take."""
    job, probe = probed.job, probed.probe
    options, examples = job.workspace.options, job.workspace.inputs.foreseen_examples(job.workspace.machine.ranks)
    if options.decomposition == "none":
        return
    for layer in probed.survey.treated:
        kept = probe.representations.get(layer.name)
        if kept is None or not _rows_beyond_solvers(kept, layer):
            continue
        sketched = layer is probe.head and not options.woodbury.approximate
        ways = ["`woodbury.approximate: true`, which sketches it"] if sketched else []
        ways.append("`woodbury.policy: auto`")
        if examples is None:
            count = "the data do not say how many"
            ways.append("data that say how many examples they hold")
        else:
            count = f"{kept.rows}"
            ways.append(f"at most {examples * LARGEST // kept.rows} examples")
        raise BeyondSolvers(
            f"`woodbury.policy: {options.woodbury.policy}` would keep the G of layer `{layer.name}`, which has "
            f"{layer.out_dim} outputs, as gradient rows ({count}), and eigensolvers take at most {LARGEST} of them; "
            f"take {', or '.join(ways)}",
            layer=layer.name,
            pointer="/woodbury/policy",
        )


def _rows_beyond_solvers(kept: Representation, layer: TreatedLayer) -> bool:
    return kept.kind == "woodbury" and kept.held_rows(layer.out_dim) > LARGEST


def _narrower(job: PassJob, survey: Survey, probe: Probe, plan: Plan) -> Narrower | None:
    """The job with its head's diagonal in place of G, and a sketch where one is allowed; None where G has to be whole.

    What an earlier attempt chose is done again: there is no other way then.
    """
    layer = next((layer for layer in survey.treated if probe.head is not None and probe.head in layer.roles), None)
    earlier = job.workspace.resume.chosen
    if (
        layer is None
        or (earlier is not None and layer.name not in earlier.sketched)
        # of head and table in one the nearest product is sought, by a norm that a diagonal alone does not tell
        or (layer is not probe.head and not job.workspace.options.woodbury.approximate)
        or job.collection.fisher == "forward_only"
        or job.collection.ekfac
    ):
        return None
    kept = _diagonal(job, layer, probe, plan)
    part = f"a sketch of rank {kept.rank}" if kept.rank else "the trace alone"
    return Narrower(
        layer=layer.name,
        probe=replace(probe, representations={**probe.representations, layer.name: kept}),
        kept=f"the diagonal and {part} of the G of `{layer.name}`",
    )


def _beyond_solvers(job: PassJob, probe: Probe, head: str) -> bool:
    """Whether the head's G, or as many of its rows, are more than solvers take, and may be sketched instead."""
    kept, options = probe.representations.get(head), job.workspace.options
    if probe.head is None or probe.head.out_dim <= LARGEST or not options.woodbury.approximate:
        return False
    if kept is None or kept.kind == "dense":
        return is_beyond_solvers(probe.head.out_dim, job.workspace, probe.dtype)
    return options.decomposition != "none" and _rows_beyond_solvers(kept, probe.head)


def _diagonal(job: PassJob, layer: TreatedLayer, probe: Probe, plan: Plan) -> Representation:
    options, size = job.workspace.options.woodbury, layer.out_dim
    terms = options.softmax_head and job.collection.fisher in ("mc", "type2")
    rank = min(options.sketch_rank, size) if options.approximate else 0
    how = f"a sketch of rank {rank} with its error's bound" if rank else "no more, as `woodbury.approximate` is off"
    why = (
        f"a dense G of {size} rows is beyond what eigensolvers can count ({LARGEST}), and its rows are as many"
        if plan.fits(job.workspace.machine.budget) and _beyond_solvers(job, probe, layer.name)
        else f"neither G, {size}² numbers, nor its rows fit (with them the plan needs "
        f"{readable_bytes(plan.largest_peak_bytes)})"
    )
    return Representation(
        kind="diagonal_sketch",
        why=f"{why}: its exact diagonal and trace are kept, and {how}",
        dtype=job.dtype,
        rank=rank,
        of_terms=terms,
    )
