"""The estimate of a whole job from shapes alone, before there are weights, sums or a device.

The model stands on the meta device, the data gives one batch, and the same forecast that a job makes
in its stage 0 is made here. What only numbers can show is assumed for the worse, and listed.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from catalog.responses.time_estimate import seconds_range
from engine.collection.pass_job import PassJob
from engine.layers.coverage import survey_layers
from engine.memory.budget import resident_bytes, warm_up
from engine.memory.plan import Plan
from engine.model.batches import map_tensors
from engine.model.determinism import set_numerics
from engine.model.meta_device import simulate_device
from engine.model.state.own_gradients import with_own_gradients
from engine.model.state.preserve_state import preserve_state
from engine.planning.choose_plan import PlannedJob, choose_plan
from engine.planning.job_plan import smallest_budgets
from engine.planning.joined_plan import host_speed, with_merge
from engine.planning.model_memory import weigh_model
from engine.planning.probe_model import probe_functional_layers, probe_model, probe_sizes
from engine.workspace import Workspace

META = torch.device("meta")
ASSUMED = (
    "every weight and every example is finite",
    "no parameter is used outside the module that holds it",
    "no example is padded: a batch is as long as its longest example",
    "tables that a batch shares can be spread over its examples",
)
"""Assumptions of a plan without weights; each makes it larger, or ends the job before it is large."""
WIDE = "what the model computes in 16 bits is as wide as the sums"
"""The same of a job with `collection.amp`."""


def estimate(workspace: Workspace, pieces: int = 1) -> dict[str, Any]:
    """Return the plan of a job from shapes alone, with its budget and the smallest that would do."""
    planned = _planned(workspace)
    plan, budget = planned.plan, workspace.machine.budget
    smallest = smallest_budgets(workspace, planned.probed.probe, planned.less)
    least_bytes = {place: least and least.size_bytes for place, least in smallest.items()}
    if workspace.inputs.part is not None:
        plan = with_merge(plan, planned.probed.probe, pieces, host_speed(workspace.machine))
        merging = plan.stage_bytes("host", "decomposition")
        # of what merges there is one way, whatever the budget
        least_bytes["host"] = least_bytes["host"] and max(least_bytes["host"], merging)
    # a job knows what its start took when it plans; here that of this process stands for it
    bounds = plan.whole_seconds_range and seconds_range(plan.whole_seconds, plan.pace)
    return plan.as_json() | {
        "seconds_range": bounds,
        **workspace.machine.planned_context,
        "fits": plan.fits(budget),
        "budget": {"device_bytes": budget.device_bytes, "host_bytes": budget.host_bytes},
        "smallest_budget": {f"{place}_bytes": least for place, least in least_bytes.items()},
        "smallest_budget_keeps": {place: (least and least.keeping) or None for place, least in smallest.items()},
        "assumed": [*ASSUMED, *([] if workspace.options.collection.amp == "off" else [WIDE])],
    }


def plan_job(workspace: Workspace) -> Plan:
    """Survey, probe and plan a job on the meta device; nothing is allocated but the first chunk of the data."""
    return _planned(workspace).plan


def _planned(workspace: Workspace) -> PlannedJob:
    """Return the plan with the probe that it was made from."""
    if workspace.inputs.model is None or workspace.inputs.task is None or workspace.inputs.batches is None:
        raise ValueError("a plan needs a model, batches and a task")
    # a job has begun its libraries' threads by the time it plans
    warm_up()
    held = resident_bytes()
    first = next(iter(workspace.inputs.batches()))
    chunk = map_tensors(tuple(first), lambda each: torch.empty(each.shape, dtype=each.dtype, device=META))

    def batches() -> Iterator[tuple[Any, ...]]:
        yield chunk

    weigh_model(workspace)
    part = workspace.inputs.part
    inputs = dataclasses.replace(
        workspace.inputs,
        batches=batches,
        part=None if part is None else dataclasses.replace(part, batches=batches),
        model=_bare(workspace.inputs.model, META),
    )
    machine = dataclasses.replace(workspace.machine, device=META)
    job = PassJob.of(dataclasses.replace(workspace, inputs=inputs, machine=machine), workspace.machine.device)
    narrow = job.precision.amp != "off"
    with simulate_device(workspace.machine.device, job.numerics, narrow=narrow):
        # the caller's flags say what is trainable; inside what follows, nothing is
        survey = survey_layers(job.model, job.collection)
    with (
        simulate_device(workspace.machine.device, job.numerics, narrow=narrow),
        preserve_state(job.model, job.dtype),
        set_numerics(job.numerics, job.heard),
    ):
        probed = with_own_gradients(job.model, lambda: probe_sizes(probe_functional_layers(probe_model(job, survey))))
        probed = probed.with_probe(dataclasses.replace(probed.probe, resident_bytes=held))
    return choose_plan(workspace, probed)


def _bare(model: nn.Module, meta: torch.device) -> nn.Module:
    """``model`` without its numbers; what is tied in it stays tied, which ``model.to`` does not see to."""
    known: dict[int, Any] = {}
    every: tuple[Tensor, ...] = (*model.parameters(), *model.buffers())
    for tensor in every:
        if not nn.parameter.is_lazy(tensor):
            bare = tensor.detach().to(meta)
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
    return copy.deepcopy(model, known)
