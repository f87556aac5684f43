"""Observed quantities of a layer: time and memory, the part of a row that differs from run to run."""

import time

import torch

from catalog.layer_record import Observed
from engine.factors.factor_set import FactorSet
from engine.memory.budget import device_bytes, resident_bytes
from engine.workspace import Workspace


def held_bytes(device: torch.device) -> tuple[int | None, int | None, int]:
    """Read the memory that is held now.

    Args:
        device: Device of the job.

    Returns:
        Bytes allocated and reserved on the device, None on a CPU, and bytes of the process on the host.
    """
    return (*device_bytes(device), resident_bytes())


def observe(
    begun: float,
    before: tuple[int | None, int | None, int],
    after: tuple[int | None, int | None, int],
    workspace: Workspace,
    whole: FactorSet,
    refused: tuple[str, ...] = (),
) -> Observed:
    """Record the time and memory that one layer took.

    Args:
        begun: Time at which its measurement began, as ``time.perf_counter`` returns it.
        before: Memory before it, as ``held_bytes`` returns it.
        after: Memory after it.
        workspace: The job, whose memory curve knows the peak.
        whole: The factor set.
        refused: Solvers that were passed over, in words.

    Returns:
        The part of a row that differs from run to run.
    """
    return Observed(
        seconds=time.perf_counter() - begun,
        allocated_before_bytes=before[0],
        allocated_after_bytes=after[0],
        reserved_before_bytes=before[1],
        reserved_after_bytes=after[1],
        host_before_bytes=before[2],
        host_after_bytes=after[2],
        not_replayed=whole.not_replayed,
        refused_rungs=refused,
        factors_from=whole.reused_from,
        measured_peak_bytes=workspace.machine.curve.stages.peak_bytes(workspace.machine.device),
    )
