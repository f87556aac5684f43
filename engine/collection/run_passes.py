"""The passes of a plan, one after another, and a fallback where memory runs out in one.

One pass gathers every layer wherever memory allows; else each pass gathers the layers of one part
of the plan and spills their factors before the next begins. The numbers are the same.

The fallbacks of a plan are half as many examples at a time, down to one, and then two passes in place of the one
that ran out, down to one layer (with those that share its A) in each. A pass begins anew with each of them, so its sums
are those of a job that had chosen that fallback to begin with, and nothing is counted twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.output_gradients import UnusedCalls
from engine.collection.checkpoints import CheckpointForeign, Checkpoints, Resumed, fingerprint
from engine.collection.collection_state import CollectionState, Cursor, fields_of_state
from engine.collection.data_pass import require_terms, run_pass
from engine.collection.normalise import keep_factors
from engine.collection.pass_job import PassJob
from engine.collection.pass_statistics import statistics_kind
from engine.collection.probe import ProbedModel
from engine.collection.ranks.agreement import Left, agree_on_checkpoint, end_together, join_cursors
from engine.collection.ranks.reduce_statistics import owners_of, reduce_statistics
from engine.collection.ranks.turns import Turns
from engine.distributed.group import RankLeft
from engine.factors.representation import DENSE
from engine.layers.coverage import Survey
from engine.memory.guard import PlanningError
from engine.memory.out_of_memory import first_line, free_memory, ran_out_of_memory
from engine.memory.plan import Chosen, Plan
from engine.merging.example_runs import joined
from engine.model.determinism import Numerics
from engine.row_layout.attention_masks import MaskBroken
from engine.row_layout.layer_calls import InputOverwritten
from engine.row_layout.shared_inputs import SharingBroken
from engine.workspace import Workspace


def complete_pass(
    job: PassJob, state: CollectionState, statistics: Sequence[LayerStatistics], cursor: Cursor, *, alone: bool
) -> Cursor:
    """Add what every rank has measured in one pass."""
    ranks, collection = job.workspace.machine.ranks, job.collection
    whole, since = join_cursors(ranks, cursor, Turns.of(ranks, collection.update_freq), collection)
    if collection.ema_decay is not None and since:
        for found in statistics:
            found.decay_(collection.ema_decay**since)
    for found in statistics:
        found.largest = float(found.largest)
    reduce_statistics(ranks, statistics, collection, owners_of(job.workspace, statistics, alone=alone))
    if ranks.one_node and ranks.traffic.total("rows").received:
        job.workspace.ports.log(
            "warning",
            "gradient rows stand once on each rank instead of once on the node, for lack of room in /dev/shm and in "
            "the folder for temporary files",
        )
    states = ranks.gather(None if state.self_check is None else state.self_check.state(), "checks of the pass")
    if state.self_check is not None and state.checked is not None:
        state.self_check.join(state.checked.state(), states)
    for heard in ranks.gather(sorted(state.nondeterministic), "operations without a deterministic form"):
        state.nondeterministic.update(heard)
    return whole


def next_fallback(chosen: Chosen, number: int, whole: int, shared: Mapping[str, str], *, aside: bool) -> Chosen | None:
    """Choose the next fallback."""
    size = min(chosen.micro_batch or whole, whole)
    if size > 1:
        return replace(chosen, micro_batch=-(-size // 2))
    groups = list(_groups(chosen.parts[number], shared))
    if not aside or len(groups) < 2:
        return None
    half = len(groups) // 2
    halves = tuple(tuple(name for group in part for name in group) for part in (groups[:half], groups[half:]))
    return replace(chosen, parts=(*chosen.parts[:number], *halves, *chosen.parts[number + 1 :]))


def describe(chosen: Chosen) -> str:
    """Describe a choice by its slices and passes."""
    slices = "whole batches" if chosen.micro_batch is None else f"slices of {chosen.micro_batch}"
    return f"{slices}, {len(chosen.parts)} pass{'es' if len(chosen.parts) > 1 else ''}"


def _groups(part: Sequence[str], shared: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    leaders = [name for name in part if shared.get(name) not in part]
    for leader in leaders:
        yield (leader, *(name for name in part if shared.get(name) == leader))


_CALLED = {
    "version": "version of torch",
    "threads": "number of threads",
    "device_name": "name of the device",
    "multiprocessors": "number of multiprocessors",
    **{name.lower(): f"version of {name}" for name in ("CUDA", "cuBLAS", "cuDNN", "cuSOLVER")},
}


def announce(workspace: Workspace, numerics: Numerics, plan: Plan | None, errors: Sequence[PlanningError]) -> None:
    """Announce the job's plan, with this attempt's numerics and where memory ran out although the plan had fitted.

    The job's port takes it as JSON; without a plan nothing is announced.
    """
    if plan is not None:
        missed = {"planning_errors": [asdict(error) for error in errors]} if errors else {}
        beside = workspace.machine.planned_context | {"numerics": numerics.recorded()} | missed
        workspace.ports.announce_plan(plan.as_json() | beside)


def run_passes(probed: ProbedModel, plan: Plan) -> CollectionState:
    """Run the passes of a plan over the data, from an earlier attempt's checkpoint where there is one.

    It returns the sums of every layer, and what they were collected from. ``EngineError`` as ``engine.errors`` lists.
    """
    job, surveyed = probed.job, probed.survey
    conditions = _conditions(job, surveyed, plan) if job.workspace.saves_checkpoints else {}
    checkpoints = Checkpoints(workspace=job.workspace, model=job.model, conditions=conditions)

    found = checkpoints.find()
    if job.workspace.saves_checkpoints:
        common = None if found is None else found.common
        if not agree_on_checkpoint(job.workspace.machine.ranks, common) and found is not None:
            checkpoints.discard("another rank has none of the same moment")
            found = None
    try:
        state = _fresh(probed) if found is None else _resumed(probed, found)
        return _run_parts(probed, plan, state, checkpoints, found)
    except CheckpointForeign as foreign:
        checkpoints.discard(str(foreign))
        checkpoints.conditions = conditions
        return _run_parts(probed, plan, _fresh(probed), checkpoints, None)


def _run_parts(
    probed: ProbedModel, plan: Plan, state: CollectionState, checkpoints: Checkpoints, found: Resumed | None
) -> CollectionState:
    job = probed.job
    number, again = 0 if found is None else found.cursor.number, False
    state.chosen = plan.chosen
    if found is not None and number == len(plan.chosen.parts):
        job.workspace.ports.log("info", "collection resumed after its last batch: every factor waits already")
        checkpoints.take_over(found)
        state.take_over(found.stored)
    while number < len(state.chosen.parts):
        before = state.settled()
        missed = _attempted(probed, state, number, checkpoints, found)
        found = None
        if missed is None:
            number, again = number + 1, False
            continue
        # outside of the except block, whose traceback held the sums
        state.restore(before)
        free_memory(job.workspace.machine.device)
        # several ranks go down together, and at once
        again = not again and job.workspace.machine.ranks.size == 1
        if again:
            found = checkpoints.under_way(number, state)
            continue
        state.chosen = _lower(job, state, number, missed)
        plan = replace(plan, chosen=state.chosen)
        probed = probed.for_passes(state.chosen, job.sizes)
        checkpoints.conditions = _conditions(job, probed.survey, plan) if job.workspace.saves_checkpoints else {}
    return state


def _attempted(
    probed: ProbedModel, state: CollectionState, number: int, checkpoints: Checkpoints, found: Resumed | None
) -> PlanningError | None:
    """Make one pass and its factors; where memory runs out, report it and keep no reference to the pass's tensors."""
    guard = probed.job.workspace.machine.guard
    free = guard.free_bytes("device"), guard.free_bytes("host")
    try:
        _pass(probed, state, number, checkpoints, found)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        said = first_line(error)
    else:
        return None
    missed = PlanningError(
        what="the collection",
        layer=None,
        stage="collection",
        rung=describe(state.chosen),
        foreseen_device_bytes=0 if guard.plan is None else guard.plan.stage_bytes("device", "collection"),
        foreseen_host_bytes=0 if guard.plan is None else guard.plan.stage_bytes("host", "collection"),
        free_device_bytes=free[0],
        free_host_bytes=free[1],
        said=said,
    )
    guard.missed(missed)
    return missed


def _lower(job: PassJob, state: CollectionState, number: int, missed: PlanningError) -> Chosen:
    """The next rung, which the job's plan holds from now on."""
    workspace = job.workspace
    whole = min(job.collection.batch_size, workspace.inputs.examples or job.collection.batch_size)
    aside = workspace.ports.scratch is not None
    chosen = next_fallback(state.chosen, number, whole, state.shared, aside=aside)
    if chosen is None:
        raise workspace.machine.guard.exhausted(missed, "take a smaller model, or measure it where more memory is free")
    workspace.ports.log("warning", f"the collection goes on with {describe(chosen)} in place of {missed.rung}")
    workspace.machine.guard.replan(chosen)
    return chosen


def _pass(
    probed: ProbedModel, state: CollectionState, number: int, checkpoints: Checkpoints, found: Resumed | None
) -> None:
    """One pass over the data, or the rest of it, and its factors."""
    job, several = probed.job, len(state.chosen.parts) > 1
    ranks = job.workspace.machine.ranks
    while True:
        here, found = found, None
        with job.workspace.machine.operation(f"pass {number + 1}", "collection"):
            statistics, cursor, left = _run_or_leave(probed, number, state, checkpoints, here)
        if ranks.size > 1:
            left = end_together(ranks, left, statistics)
        if not left:
            break
        _take_in(job, state, left)
        state.begin_anew()
    state.batches = cursor.batches
    if ranks.size > 1:
        cursor = complete_pass(job, state, statistics, cursor, alone=not several)
    if job.workspace.inputs.part is None:
        # the other parts may have loss terms
        require_terms(job, cursor, statistics)
    state.entered = job.require_entered(state.entered, cursor.entered, f"pass {number + 1} of the collection")
    state.examples, state.updates, state.loss_scale = cursor.examples, cursor.updates, cursor.loss_scale
    state.runs = joined(cursor.runs)
    for each in statistics:
        each.end_pass_()
    state.statistics |= {each.layer.name: each for each in statistics}
    with job.workspace.machine.operation(f"factors of pass {number + 1}", "collection"):
        keep_factors(job.workspace, job.dtype, state, statistics, aside=several)
    if several and job.workspace.saves_checkpoints:
        # what waits on the disk is never collected again
        after = Cursor(number=number + 1, examples=state.examples, updates=state.updates)
        after.loss_scale, after.runs = state.loss_scale, state.runs
        checkpoints.save(after, (), state)


def _run_or_leave(
    probed: ProbedModel, number: int, state: CollectionState, checkpoints: Checkpoints, found: Resumed | None
) -> tuple[tuple[LayerStatistics, ...], Cursor, Left]:
    """Run a pass; where it cannot go on as it was planned, return why, with no sums."""
    ranks = probed.job.workspace.machine.ranks
    try:
        return *run_pass(probed, number, state, checkpoints, found), Left()
    except SharingBroken as broken:
        # rare: a model that feeds its layers differently from batch to batch
        left = Left(unshared=frozenset(broken.followers))
    except MaskBroken as broken:
        left = Left(unmasked=broken.calls)
    except UnusedCalls as unused:
        left = Left(deferred=unused.layers)
    except InputOverwritten as written:
        left = Left(overwritten=frozenset(written.layers))
    except RankLeft:
        left = Left(interrupted=frozenset({ranks.rank}))
    except Exception as error:
        # what one rank alone lacks memory for, all begin anew with less
        if ranks.size == 1 or not ran_out_of_memory(error):
            raise
        left = Left(out_of_memory=frozenset({f"rank {ranks.rank}: {first_line(error)}"}))
    return (), Cursor(number=number), left


def _take_in(job: PassJob, state: CollectionState, left: Left) -> None:
    """Let the pass that follows know why the one before was left."""
    log = job.workspace.ports.log
    if left.out_of_memory:
        raise MemoryError("; ".join(sorted(left.out_of_memory)))
    if left.unmasked:
        broken = MaskBroken(left.unmasked)
        log("info", f"padding takes part in {broken}: all of its positions count")
    if left.deferred:
        log("info", f"some calls of {UnusedCalls(left.deferred)} have no gradient: their inputs do not enter A")
    state.unmasked |= left.unmasked
    state.deferred |= left.deferred
    state.overwritten |= left.overwritten
    state.shared = {
        name: leader
        for name, leader in state.shared.items()
        if name not in left.unshared and left.deferred.isdisjoint((name, leader))
    }


def _conditions(job: PassJob, surveyed: Survey, plan: Plan) -> dict[str, Any]:
    """Everything that a checkpoint's bits depend on, each entry under the name that a refusal calls it by."""
    layers = [[layer.name, type(layer).__name__, layer.form, layer.in_dim, layer.out_dim] for layer in surveyed.treated]
    ranks = job.workspace.machine.ranks
    return {
        **job.workspace.resume.conditions,
        **{_CALLED.get(name, name): value for name, value in job.numerics.recorded().items()},
        "collection": asdict(job.collection),
        "woodbury": asdict(job.workspace.options.woodbury),
        "task": asdict(job.task),
        "plan": asdict(plan.chosen),
        "model": fingerprint(job.model),
        "set of layers": layers,
        "set of saved fields": fields_of_state(),
        **({} if ranks.size == 1 else {"rank": [ranks.rank, ranks.size]}),
    }


def _fresh(probed: ProbedModel) -> CollectionState:
    """The state before the first pass, with objects of its own: what an attempt that failed put into others is gone."""
    job, ranks = probed.job, probed.job.workspace.machine.ranks
    first = job.first_check
    return CollectionState(
        statistics={},
        factors={},
        shared=dict(probed.probe.shared),
        overwritten=job.layout.overwritten,
        nondeterministic=job.heard,
        self_check=None if first is None else first.resumed(first.state()),
        traffic=None if ranks.size == 1 else ranks.traffic,
    )


def _resumed(probed: ProbedModel, found: Resumed) -> CollectionState:
    """The state after the finished passes of an earlier attempt; that of the one under way follows with its sums."""
    job, fresh, stored = probed.job, _fresh(probed), found.stored["checked" if found.running else "self_check"]
    state = replace(
        found.state,
        nondeterministic=fresh.nondeterministic,
        traffic=fresh.traffic,
        self_check=fresh.self_check if fresh.self_check is None else fresh.self_check.resumed(stored),
        # the pass under way was counted when it began
        passes=found.state.passes - bool(found.running),
    )
    treated = {layer.name: layer for layer in probed.survey.treated}
    for name, numbers in found.finished.items():
        leader = state.statistics[state.shared[name]] if name in state.shared else None
        # the sharing stands in what was stored
        state.statistics[name] = statistics_kind(treated[name])(
            layer=treated[name], sharing="", leader=leader, representation=job.representations.get(name, DENSE)
        )
        state.statistics[name].put_plain(numbers)
    scratch = job.workspace.ports.scratch
    if scratch is not None:
        state.factors = {name: partial(spilled.load, scratch) for name, spilled in state.spilled.items()}
    return state
