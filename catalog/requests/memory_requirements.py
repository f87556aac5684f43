"""The memory that a job needs where it computes: from its document alone, and then from its plan.

The document gives a bound from below, by closed formulas, before any model is built: the weights of a builtin model
and the one slice of synthetic examples that must stand beside them. A budget that the document names bounds a job
from above, so it says nothing here. The plan that the job makes when it begins replaces the figure.
"""

import math
from collections.abc import Mapping
from typing import Any

from catalog.requests.inputs import BuiltinModel, DataFactory, ModelFactory, SyntheticData
from catalog.requests.job import JobDocument
from catalog.requests.memory import Memory, amount_bytes

BUILTIN_PARAMETERS = {"digits_cnn": 10_026, "digits_mlp": 8_970, "tiny_gpt": 236_928}
"""Numbers that the weights of each builtin model hold."""

_TOKEN_BYTES = 8


def least_bytes(document: JobDocument) -> int | None:
    """Return a lower bound of the memory that a job needs where it computes, by its document alone, in bytes.

    None if the document does not show any.
    """
    number_bytes = 8 if document.collection.dtype == "float64" else 4
    known: list[int] = []
    if isinstance(document.model, BuiltinModel):
        known.append(BUILTIN_PARAMETERS[document.model.name] * number_bytes)
    if isinstance(document.data, SyntheticData):
        known.append(_slice_bytes(document, document.data, number_bytes))
    return sum(known) if known else None


def planned_bytes(plan: Mapping[str, Any], memory: Memory) -> int | None:
    """Return the memory that a device must have free for a plan, or the host if the plan uses no device.

    For a budget that is a fraction of what is free, it is so much more than the peak that the rest stays free.

    Args:
        plan: The plan, with `device_peak_bytes` or `host_peak_bytes`.
        memory: The budgets of the job's document.

    Returns:
        Bytes; None if the plan names no peak.
    """
    for place in ("device", "host"):
        peak = plan.get(f"{place}_peak_bytes")
        if isinstance(peak, int) and 0 < peak < 2**62:
            named = getattr(memory, place)
            whole = named != "auto" and isinstance(named, str)
            return peak if whole else min(math.ceil(peak * 2**40 / amount_bytes(place, named, 2**40)), 2**62)
    return None


def memory_of(document: Mapping[str, Any]) -> Memory:
    """Return the budgets of a stored document for device and host; those that it does not name have their defaults."""
    given = document.get("memory") or {}
    return Memory(**{name: given[name] for name in ("device", "host") if name in given})


def factories_of(document: JobDocument) -> tuple[str | None, str | None]:
    """Return the model's and the data's factory, ``package.module:callable``, that a worker must be allowed to call.

    None for a source without one.
    """
    model = document.model.factory if isinstance(document.model, ModelFactory) else None
    data = document.data.factory if isinstance(document.data, DataFactory) else None
    return model, data


def _slice_bytes(document: JobDocument, data: SyntheticData, number_bytes: int) -> int:
    # without a size of its own a slice may be as small as one example
    examples = min(document.memory.micro_batch or 1, document.collection.batch_size, data.examples)
    return examples * math.prod(data.shape) * (number_bytes if data.vocabulary is None else _TOKEN_BYTES)
