"""Uncollected jobs: refusals of what has no meaning beside an analysis that measures no curvature of a given model."""

from typing import Any

from catalog.analyses.analysis import Analysis
from catalog.record import FieldError
from catalog.requests.collection import Collection, Stabilisation
from catalog.requests.memory import Memory
from catalog.requests.woodbury import Woodbury

_BLOCKS = ("model", "task", "factors", "extends", "shards")
_OPTIONS = {"collection": Collection, "stabilisation": Stabilisation, "woodbury": Woodbury}
_HELD = ("micro_batch", "offload", "activation_checkpointing", "model_sharding")


def require_alone(document: Any, analysis: Analysis) -> None:  # noqa: ANN401 - the job document, floors above
    """Refuse what has no meaning beside an analysis that collects nothing.

    Args:
        document: The job document.
        analysis: The analysis, one of the document's.

    Raises:
        FieldError: If another analysis, an option of a collection or an input that it does not take is given, or one
            that it takes is missing.
    """
    kind = f"`{analysis.kind}`"
    if len(document.kinds) > 1:
        raise FieldError("kind", f"names {kind} beside others, and it collects nothing; give it a job of its own")
    for name in analysis.inputs:
        if getattr(document, name) is None:
            raise FieldError(name, f"is missing; {kind} needs `{name}`")
    for name in _BLOCKS:
        if name not in analysis.inputs and getattr(document, name) is not None:
            raise FieldError(name, f"has no part in {kind}; leave it out")
    _require_no_options(document, kind)
    if document.world_size != 1:
        raise FieldError("world_size", f"is {document.world_size}, and {kind} computes in one process; leave it out")
    others = [name for name in document.keep if name != "spectra"]
    if others:
        raise FieldError("keep", f"holds `{others[0]}`, and {kind} makes none; leave it out")


def _require_no_options(document: Any, kind: str) -> None:  # noqa: ANN401 - the job document, floors above
    """Refuse options of a collection."""
    for name, options in _OPTIONS.items():
        if getattr(document, name) != options():
            raise FieldError(name, f"has no part in {kind}, which collects nothing; leave it out")
    for name in _HELD:
        if getattr(document.memory, name) != getattr(Memory(), name):
            raise FieldError(f"memory.{name}", f"has no part in {kind}, which plans its own slices; leave it out")
