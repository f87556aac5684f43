"""A given matrix: what its row and its entry in the index say, where no collection made it."""

from dataclasses import replace
from typing import Any

from catalog.responses.layer_record import LayerRecord
from engine.factors.factor_set import LayerFacts
from engine.linalg.eigenbasis import Eigenbasis
from engine.measurement.clip_factor import Made

_COLLECTED = (
    "policy", "damping_split", "lambda_A", "lambda_G", "lambda_A_relative", "lambda_G_relative", "update_freq",
    "update_index", "positions", "positions_local", "terms", "world_size", "reduction", "sent_bytes", "pieces",
    "accumulation_dtype", "accumulation_precision", "amp", "fisher", "sharing", "samples", "seed", "passes", "digest_A",
    "kappa_A", "kappa_A_clipped", "clipped_A", "scale_A", "scale_G",
)  # fmt: skip


def record_without_collection(record: LayerRecord) -> LayerRecord:
    """Return the record of a matrix that no collection made."""
    unknown: dict[str, Any] = dict.fromkeys(_COLLECTED)
    return replace(record, **unknown)


def index_entry(facts: LayerFacts, made: Made, file: str) -> dict[str, Any]:
    """Return the matrix's entry in the index of stabilised factors: a single side G."""
    side = {
        "kind": "eigenbasis" if isinstance(made.content, Eigenbasis) else "matrix",
        "floor": made.side.floor,
        "scale": 1.0,
        "stored_as": facts.name,
    }
    return {
        "ordinal": facts.ordinal,
        "name": facts.name,
        "form": facts.form,
        "holder_of_A": facts.ordinal,
        "file": file,
        "sides": {"G": side},
    }
