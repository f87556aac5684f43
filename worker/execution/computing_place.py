"""Computing place of a job or a plan: the device with the bytes that the job may hold there and on the host.

A plan may be asked for a device of another machine (`kronoscope plan --device cuda`). Nothing can be measured
then: the document names the device's bytes, and the plan says what was taken for granted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from catalog.record import FieldError
from catalog.requests.job import JobDocument
from engine.distributed.group import Ranks
from engine.memory.budget import MemoryBudget
from engine.memory.limits import hold_device
from worker.execution.refusal import Refusal

_UNMEASURED = (
    "what is free on the device: all of its budget is",
    "what CUDA takes for itself and its libraries (some hundred MiB of the device, and more of the host than here)",
    "the device's pace: that of a usual GPU",
    "its compute capability: units for bfloat16 and TF32, and the attention kernels of recent GPUs",
)


@dataclass(frozen=True, kw_only=True)
class ComputingPlace:
    """One job's device and budget."""

    device: torch.device
    memory: MemoryBudget
    unmeasured: tuple[str, ...] = ()
    """Assumptions of a plan for a device that is not here; empty where the device is here."""

    threads: Mapping[str, Any] = field(default_factory=dict)
    """The plan's entries on computing threads."""
    ranks: Ranks = field(default_factory=Ranks.alone)
    """The ranks of the job, seen from this process."""

    @property
    def here(self) -> bool:
        """Whether the device is one of this machine's."""
        return not self.unmeasured

    @property
    def guarded(self) -> torch.device:
        """The device that a guard asks what is free: one that is not here has nothing to ask."""
        return self.device if self.here else torch.device("cpu")


def computing_place(
    document: JobDocument, here: torch.device, bounds: Mapping[str, int], wanted: Literal["cpu", "cuda"] | None = None
) -> ComputingPlace:
    """Return where ``document`` is computed, its budget measured; or planned to be, on the device that is ``wanted``.

    Call it before the model is there: the plan counts its weights.
    """
    device = here if wanted in (None, here.type) else torch.device(str(wanted))
    if device.type == "cuda" and here.type != "cuda":
        try:
            memory = MemoryBudget.named(document.memory)
        except FieldError as error:
            raise Refusal(error.message, pointer=f"/memory/{error.field}") from error
        host = () if document.memory.host != "auto" else ("the host's memory: what is free of this machine's",)
        return ComputingPlace(device=device, memory=memory, unmeasured=(*_UNMEASURED, *host))
    memory = MemoryBudget.measure(document.memory, device, replace(MemoryBudget.unlimited(), **bounds))
    hold_device(memory, device)
    return ComputingPlace(device=device, memory=memory)
