"""Series: one job for each of several checkpoints of a model, and what changes from one to the next."""

import math
from dataclasses import replace
from typing import Any

from catalog.record import FieldError, record
from catalog.requests.inputs import require_path

MOST_CHECKPOINTS = 200
_FIELDS = {"directory": "path", "huggingface": "revision"}
"""The field of `model` that a checkpoint takes the place of, by its source."""


@record
class Series:
    """The checkpoints, in their order."""

    model: tuple[str, ...]
    """2 to 200 of them: each takes the place of `model.path` (`source: directory`) or of `model.revision` (`source:
    huggingface`) in a job of its own, which counts in your quotas."""
    learning_rate: float | tuple[float, ...] | None = None
    """Step size η of the training, one for all or one for each: gradient descent is stable where λ_max of the Hessian
    is below 2/η, which is drawn beside it."""
    overlaps: bool = True
    """Whether leading eigenspaces of consecutive checkpoints are compared, for each number of `compare_curvature.k`.
    Factors are kept until then; `keep: [factors]` keeps them for good."""

    def __post_init__(self) -> None:
        """Refuse a series of one, of too many, or with a checkpoint twice, and rates that are none."""
        if not 2 <= len(self.model) <= MOST_CHECKPOINTS:
            raise FieldError("model", f"names {len(self.model)} checkpoints; give 2 to {MOST_CHECKPOINTS}")
        for place, name in enumerate(self.model):
            require_path("model", name)
            if name in self.model[:place]:
                raise FieldError("model", f"names `{name[:80]}` twice; name each checkpoint once")
        rates = self.learning_rate if isinstance(self.learning_rate, tuple) else (self.learning_rate,)
        if isinstance(self.learning_rate, tuple) and len(rates) != len(self.model):
            raise FieldError(
                "learning_rate", f"has {len(rates)} values for {len(self.model)} checkpoints; give one, or one for each"
            )
        for rate in rates:
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise FieldError("learning_rate", f"holds {rate}; take numbers above 0")


def require_series(document: Any) -> None:  # noqa: ANN401 - a job document, whose module imports this one
    """Refuse a series of a model that has no checkpoints, or beside what cannot be made once for each.

    Raises:
        FieldError: On `series`, or on what contradicts it.
    """
    if document.series is None:
        return
    if getattr(document.model, "source", None) not in _FIELDS:
        raise FieldError("series", f"needs a `model` with `source` {' or '.join(_FIELDS)}; give that of one checkpoint")
    if document.shards is not None:
        raise FieldError("shards", f"is {document.shards}, and `series` makes a job for each checkpoint; leave it out")


def checkpoint_documents(document: Any) -> tuple[Any, ...]:  # noqa: ANN401 - job documents
    """Return the documents of a series' jobs, in order; none where the document has no series."""
    if document.series is None:
        return ()
    field = _FIELDS[document.model.source]
    keep = (*document.keep, *({"factors"} - {*document.keep} if document.series.overlaps else ()))
    models = [replace(document.model, **{field: name}) for name in document.series.model]
    return tuple(replace(document, series=None, keep=keep, model=model) for model in models)
