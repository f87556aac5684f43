"""The joined plan of a divided job: the collection of one piece, the merge of all, and the analyses afterwards."""

from dataclasses import replace

from engine.collection.probe import Probe
from engine.memory.plan import Plan
from engine.planning.job_plan import complete_plan
from engine.planning.later.merge import host_speed, with_merge
from engine.workspace import JobOptions, Workspace


def with_join(plan: Plan, workspace: Workspace, probe: Probe, pieces: int, options: JobOptions) -> Plan:
    """Add to the plan of a piece what the job does once all pieces have ended.

    Args:
        plan: The plan of a piece, which collects and analyses nothing.
        workspace: The job, with the options of a piece.
        probe: Layers and representations.
        pieces: How many pieces there are at most.
        options: The options of the whole job.

    Returns:
        The plan with the bytes and seconds of merge, decompositions and analyses. Bytes of the last two are left out
        where they do not fit beside: another machine may join the pieces, and each of its stages takes a cheaper way
        where memory is short.
    """
    own = workspace.options
    workspace.options = options
    try:
        whole = complete_plan(workspace, probe, plan.chosen)
    finally:
        workspace.options = own
    host = host_speed(workspace.machine)
    joined = with_merge(replace(whole, why=plan.why), probe, pieces, host)
    if joined.fits(workspace.machine.budget):
        return joined
    return with_merge(replace(plan, seconds=whole.seconds), probe, pieces, host)
