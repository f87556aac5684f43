"""Observed quantities of a layer: time and memory, the part of a row that differs from run to run."""

import time

import torch

from catalog.responses.layer_record import Observed
from engine.factors.factor_set import FactorSet
from engine.memory.budget import device_bytes, resident_bytes
from engine.workspace import Workspace


def held_bytes(device: torch.device) -> tuple[int | None, int | None, int]:
    """Read the memory that is held now."""
    return (*device_bytes(device), resident_bytes())


def observe(
    begun: float,
    before: tuple[int | None, int | None, int],
    after: tuple[int | None, int | None, int],
    workspace: Workspace,
    whole: FactorSet,
    refused: tuple[str, ...] = (),
) -> Observed:
    """Record the time and memory that one layer took."""
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
