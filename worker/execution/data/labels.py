"""Labels as a data file gives them: class indices or numbers, of which none is rounded, cut or wrapped."""

import math

import torch

_CLASS_TASKS = frozenset({"classification", "sequence_classification"})
_LARGEST_NUMBER = torch.finfo(torch.float32).max
"""Targets of a regression are float32."""


def label_fault(label: object, task: str) -> str | None:
    """Return what is wrong with a label."""
    if isinstance(label, bool) or not isinstance(label, (int, float)):
        return f"must be a number (got {_shown(label)})"
    if isinstance(label, float) and not math.isfinite(label):
        return f"must be a finite number (got {label})"
    if task in _CLASS_TASKS and (label != int(label) or not -(2**63) <= label < 2**63):
        return f"must be a class index, a whole number, for `{task}` (got {_shown(label)})"
    if abs(label) > _LARGEST_NUMBER:
        return f"must lie within ±{_LARGEST_NUMBER:.2g}, as float32 does (got {_shown(label)})"
    return None


def read_label(label: float, task: str) -> float:
    """Return a sound label as the task's targets hold it."""
    return int(label) if task in _CLASS_TASKS else label


def _shown(label: object) -> str:
    # a number of 5,000 digits has no text within Python's own limit
    if isinstance(label, int) and abs(label) >= 10**30:
        return "a number of more than 30 digits"
    return repr(label)[:60]
