"""A joined job: what several ranks settle before the first pass, and what they refuse.

nested       refused: the first N/8 examples of the whole are not the first of any rank
reduction    `none` is refused where more than one rank holds data
             `dense` sums G densely everywhere, so no layer keeps rows
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from engine.collection.checkpoints import fingerprint
from engine.collection.pass_job import PassJob
from engine.collection.probe import Probe, ProbedModel
from engine.collection.ranks.agreement import planner_of, require_alike, share_first_batch, total_examples
from engine.distributed.group import Ranks
from engine.distributed.node_memory import join_node
from engine.errors import ModelRefused, RanksRefused, UsageError
from engine.factors.factor_set import FactorSet
from engine.factors.representation import Representation
from engine.memory.plan import Plan
from engine.model.sharding.gathered_parameters import describe_units
from engine.model.sharding.gathering import gather_on_request
from engine.workspace import Workspace


def join_ranks(ranks: Ranks, job: PassJob) -> PassJob:
    """Settle what every rank must know before the model is probed, with the first batch that all ranks look at.

    ``EmptyData`` if no rank holds an example, ``RanksRefused`` if several ranks cannot do exactly what is asked for, or
    do not hold the same model.
    """
    _require_possible(ranks, job)
    require_alike(ranks, (job.collection, job.task), "options of the collection")
    require_alike(ranks, fingerprint(job.model), "model")
    join_node(ranks)
    inputs = job.workspace.inputs
    inputs.examples_of_all = total_examples(ranks, inputs.examples)
    first = next(job.stream(), None)
    if first is not None:
        job.noted(first)
    holders = sum(ranks.gather(first is not None, "ranks with data"))
    if job.collection.reduction == "none" and holders > 1:
        raise RanksRefused(
            f"`collection.reduction` none leaves each of the {holders} ranks that hold data with factors of its own "
            "part, which are those of no model; take `gram`, `gather`, `dense` or `auto`",
            pointer="/collection/reduction",
        )
    if job.collection.reduction == "dense":
        job.workspace.options.woodbury = replace(job.workspace.options.woodbury, policy="dense")
    return replace(job, shared_first=share_first_batch(ranks, first))


def gather_model(job: PassJob) -> AbstractContextManager[None]:
    """Return a context in which a sharded model's parameters are whole, unit by unit; other models stay as they are.

    ``ModelRefused`` for one sharded otherwise than by ``fully_shard``, ``RanksRefused`` if ranks do not shard it alike.
    """
    ranks = job.workspace.machine.ranks
    if ranks.size > 1:
        require_alike(ranks, describe_units(job.model), "sharding of the model")
    return gather_on_request(job.model, ranks, job.workspace.machine.device)


def _require_possible(ranks: Ranks, job: PassJob) -> None:
    if job.collection.nested:
        raise RanksRefused(
            f"`collection.nested` keeps the first N/8, N/4 and N/2 examples of the data, and {ranks.size} ranks read "
            "them side by side; leave it out, or measure with one rank",
            pointer="/collection/nested",
        )


def follow_planner(ranks: Ranks, workspace: Workspace, probed: ProbedModel, plan: Plan) -> tuple[ProbedModel, Plan]:
    """Return the plan of the rank with the smallest budget, and the probed model with the representations of that plan.

    ``RanksRefused`` if the ranks have found different layers.
    """
    probe = probed.probe
    found = [(layer.name, type(layer).__name__, layer.form, layer.in_dim, layer.out_dim) for layer in probe.layers]
    require_alike(ranks, (found, dict(probe.shared), sorted(probed.job.layout.tables), sorted(probe.mixed)), "layers")
    own: tuple[Plan, Mapping[str, Representation]] = plan, dict(probe.representations)
    chosen, representations = ranks.broadcast(own, planner_of(ranks, workspace.machine.budget), "plan")
    followed: Probe = replace(probe, representations=representations)
    return probed.with_probe(followed), chosen


def require_same_checks(ranks: Ranks, failed: Sequence[str]) -> None:
    """Raise ``RanksRefused`` if other layers failed the first check on another rank, as if devices round otherwise."""
    require_alike(ranks, sorted(failed), "layers that fail the gradient identity")


def require_one_rank(workspace: Workspace, field: str) -> None:
    """Require that what an analysis computes from the data itself is not asked of several ranks or a sharded model.

    ``field`` names the option that asks for it. ``RanksRefused`` if there are several, ``ModelRefused`` if it is
    sharded.
    """
    ranks = workspace.machine.ranks
    if ranks.size > 1:
        raise RanksRefused(
            f"`{field}` passes over the data once more, and each of the {ranks.size} ranks holds a part of them; "
            "measure it with one rank, or leave it out",
            pointer=f"/{field.replace('.', '/')}",
        )
    if workspace.inputs.model is not None and describe_units(workspace.inputs.model):
        raise ModelRefused(
            f"`{field}` passes over the data with all parameters of the model at once, and this model is sharded; "
            "measure it before `fully_shard`, or leave it out",
            pointer=f"/{field.replace('.', '/')}",
        )


def pass_again(workspace: Workspace, whole: FactorSet, field: str, asked: str) -> PassJob:
    """Return what an analysis needs that passes over the examples of a collection once more, without autocast.

    ``field`` names the option that asks for it, ``asked`` is the same with its value, for the message. ``UsageError``
    if stored factors stand in place of the model; other errors as of ``require_one_rank`` and ``PassJob.settled``.
    """
    if workspace.inputs.model is None or workspace.inputs.task is None or workspace.inputs.batches is None:
        raise UsageError(
            f"stored factors hold no model, and `{asked}` needs it: give `model`, `data` and `task`",
            pointer=f"/{field.replace('.', '/')}",
        )
    require_one_rank(workspace, field)
    return PassJob.again(workspace, whole)
