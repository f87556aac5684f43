"""The model types that are served: a reviewed list, with the head that each task takes of a type.

``model_types.json`` is written by ``make architectures-list`` from the pinned transformers. A newer transformers adds
none by itself. A type without a head is a part of others: it may stand in a nested configuration alone.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.execution.refusal import names

LIST = Path(__file__).with_name("model_types.json")
HEADS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "image": "AutoModelForImageClassification",
    "audio": "AutoModelForAudioClassification",
    "encoding": "AutoModelForTextEncoding",
    "model": "AutoModel",
}
"""The class of transformers that builds each head."""
_CLASSES = ("sequence", "image", "audio")
_BARE = ("encoding", "model")
_HEADS_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "causal_lm": ("causal_lm",),
    "masked_lm": ("masked_lm",),
    "sequence_classification": _CLASSES,
    "classification": _CLASSES,
    "regression": _CLASSES,
    "token_classification": ("token",),
    "sentence_embedding": _BARE,
    "embedding": _BARE,
}
"""Heads that do a task, the first of which a type has is taken."""


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """One architecture of the list."""

    name: str
    config: str
    """Name of transformers' configuration class."""
    heads: frozenset[str]
    older: frozenset[str]
    """Names of fields from older versions that this class still reads."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that it does, in alphabetic order."""
        return tuple(sorted(task for task, heads in _HEADS_OF_TASK.items() if self.heads & set(heads)))

    def auto_class(self, task: str) -> str | None:
        """Return the name of the class that builds this type for a task; None where it does not do the task."""
        return next((HEADS[head] for head in _HEADS_OF_TASK[task] if head in self.heads), None)


@functools.cache
def _listed() -> tuple[Mapping[str, ModelType], Mapping[str, str]]:
    found: Any = json.loads(LIST.read_text())
    types = {
        name: ModelType(
            name=name, config=entry["config"], heads=frozenset(entry["heads"]), older=frozenset(entry["older"])
        )
        for name, entry in found["types"].items()
    }
    return types, found["left_out"]


def model_types() -> Mapping[str, ModelType]:
    """Return the types of the list by name."""
    return _listed()[0]


def reason_unknown(name: object) -> str:
    """Return why a type is not served, for a sentence that begins with its name."""
    left_out = _listed()[1]
    if isinstance(name, str) and name in left_out:
        return f"is left out: {left_out[name]}; load the model yourself (`source: factory`)"
    if isinstance(name, str) and name in model_types():
        return "is a part of other models, with no class of its own"
    return f"is not one of the {len(model_types())} that are served ({names(sorted(model_types()), 8)})"
