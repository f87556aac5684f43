"""The memory that a job needs where it computes: from its document alone, and then from its plan.

The document gives a bound from below, by closed formulas, before any model is built: the weights of a builtin model
and the one slice of synthetic examples that must stand beside them. A budget that the document names bounds a job
from above, so it says nothing here. The plan that the job makes when it begins replaces the figure.
"""

import math
from collections.abc import Mapping
from typing import Any

from catalog.inputs import BuiltinModel, SyntheticData
from catalog.job import JobDocument

BUILTIN_PARAMETERS = {"digits_cnn": 10_026, "digits_mlp": 8_970, "tiny_gpt": 236_928}
"""Numbers that the weights of each builtin model hold."""

_TOKEN_BYTES = 8


def least_bytes(document: JobDocument) -> int | None:
    """Bytes below which the job cannot be done where it computes; None where the document does not tell."""
    number_bytes = 8 if document.collection.dtype == "float64" else 4
    known: list[int] = []
    if isinstance(document.model, BuiltinModel):
        known.append(BUILTIN_PARAMETERS[document.model.name] * number_bytes)
    if isinstance(document.data, SyntheticData):
        known.append(_slice_bytes(document, document.data, number_bytes))
    return sum(known) if known else None


def planned_bytes(plan: Mapping[str, Any]) -> int | None:
    """The peak that a plan foresees on the device, or on the host where there is none; None if it names neither."""
    peaks = (plan.get("device_peak_bytes"), plan.get("host_peak_bytes"))
    return next((peak for peak in peaks if isinstance(peak, int) and 0 < peak < 2**63), None)


def _slice_bytes(document: JobDocument, data: SyntheticData, number_bytes: int) -> int:
    # without a size of its own a slice may be as small as one example
    examples = min(document.memory.micro_batch or 1, document.collection.batch_size, data.examples)
    return examples * math.prod(data.shape) * (number_bytes if data.vocabulary is None else _TOKEN_BYTES)
