"""Planning: the plan of a whole job from shapes alone, before there are weights, sums or a device.

The model stands on the meta device, the data gives one batch, and the same forecast that a job makes
in its stage 0 is made here. What only numbers can show is assumed for the worse, and listed.
"""

import copy
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.collection.data_pass import PassJob
from engine.layers.coverage_check import surveyed
from engine.layers.layer import TreatedLayer
from engine.memory.budget import resident_bytes
from engine.memory.limits import warm_up
from engine.memory.plan import Plan
from engine.model.batches import mapped
from engine.model.determinism import Numerics, pinned
from engine.model.meta_device import shapes_alone
from engine.model.mixed_precision import usable
from engine.model.preserve_state import untouched
from engine.planning.collection_time import calibrated
from engine.planning.dry_run import dry_run, looked_into, represented, with_activations
from engine.planning.head_representation import narrowed
from engine.planning.job_plan import forecast, smallest_budgets
from engine.planning.layer_memory import DryRun, Narrower
from engine.planning.model_memory import weigh_model
from engine.row_layout.layer_calls import followers
from engine.workspace import Workspace

ASSUMED = (
    "every weight and every example is finite",
    "no parameter is used outside the module that holds it",
    "no example is padded: a batch is as long as its longest example",
    "tables that a batch shares can be spread over its examples",
)
"""What a plan without weights takes for given; each makes it larger, or ends the job before it is large."""
WIDE = "what the model computes in 16 bits is as wide as the sums"
"""The same of a job with `collection.amp`."""


def estimate(workspace: Workspace) -> dict[str, Any]:
    """The plan of the job in ``workspace`` as a table, with what it is held against and what would do.

    Raises:
        EngineError: If model, data and task do not belong together.
    """
    plan, given, less = _looked_at(workspace)
    smallest = smallest_budgets(*given, less)
    budget = workspace.machine.budget
    return plan.as_json() | {
        "fits": plan.fits(budget),
        "budget": {"device_bytes": budget.device_bytes, "host_bytes": budget.host_bytes},
        "smallest_budget": {f"{place}_bytes": least and least.size_bytes for place, least in smallest.items()},
        "smallest_budget_keeps": {place: (least and least.keeping) or None for place, least in smallest.items()},
        "assumed": [*ASSUMED, *([] if workspace.options.collection.amp == "off" else [WIDE])],
    }


def plan_job(workspace: Workspace) -> Plan:
    """The plan of the job in ``workspace``, whose model may stand on the meta device; it stays where it is.

    Nothing is allocated but the first chunk of the data.

    Raises:
        EngineError: If model, data and task do not belong together.
    """
    return _looked_at(workspace)[0]


def _looked_at(
    workspace: Workspace,
) -> tuple[Plan, tuple[Workspace, torch.dtype, tuple[TreatedLayer, ...], DryRun, dict[str, str]], Narrower | None]:
    """The plan, what its forecast is made from, and what less of the head's G the job may keep."""
    if workspace.inputs.model is None or workspace.inputs.task is None or workspace.inputs.batches is None:
        raise ValueError("a plan needs a model, batches and a task")
    # a job has begun its libraries' threads by the time it plans
    warm_up()
    held = resident_bytes()
    dtype = torch.float64 if workspace.options.collection.dtype == "float64" else torch.float32
    meta = torch.device("meta")
    first = next(iter(workspace.inputs.batches()))
    chunk = mapped(tuple(first), lambda tensor: _shape_of(tensor, meta))

    def batches() -> Iterator[tuple[Any, ...]]:
        yield chunk

    weigh_model(workspace)
    model = _bare(workspace.inputs.model, meta)
    job = PassJob(
        workspace=dataclasses.replace(
            workspace,
            inputs=dataclasses.replace(workspace.inputs, batches=batches, model=model),
            machine=dataclasses.replace(workspace.machine, device=meta),
        ),
        model=model,
        task=workspace.inputs.task,
        collection=workspace.options.collection,
        dtype=dtype,
        numerics=Numerics.here(workspace.machine.device, workspace.resume.numerics),
        heard=set(),
        precision=usable(workspace.options.collection.amp, workspace.machine.device),
    )
    with shapes_alone(workspace.machine.device):
        # the caller's flags say what is trainable; inside what follows, nothing is
        found = surveyed(job.model, job.collection)
    with shapes_alone(workspace.machine.device), untouched(job.model, dtype), pinned(job.numerics, job.heard):
        job, seen, mixed = dry_run(job, found)
        found, seen, mixed = looked_into(job, found, seen, mixed)
        seen = represented(job, found, with_activations(job, found, seen, mixed))
        seen = dataclasses.replace(seen, resident_bytes=held)
    shared = followers(seen.calls, found.treated)
    foretell = partial(forecast, workspace, dtype, found.treated, shared=shared)
    plan = foretell(seen)
    plan = foretell(seen) if calibrated(workspace, plan) else plan
    _, plan, less = narrowed(job, found, seen, plan, foretell)
    return plan, (workspace, dtype, found.treated, seen, shared), less


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


def _shape_of(tensor: Tensor, meta: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=meta)
