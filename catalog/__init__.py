"""Requests and their results: the ground floor, standard library only.

``ANALYSES`` is the one list. The document, the menu, the codec, dispatch and the contract tests
are derived from it: a new analysis is a file in ``catalog/analyses``, a file in ``engine/analyses``, and
its import and one word below.
"""

import dataclasses
from functools import cache
from typing import Any, Literal

from catalog.analyses.analysis import Analysis, AnalysisStage
from catalog.analyses.capacity import CAPACITY
from catalog.analyses.compare_curvature import COMPARE_CURVATURE
from catalog.analyses.compression import COMPRESSION
from catalog.analyses.export import EXPORT
from catalog.analyses.factors import FACTORS
from catalog.analyses.fewshot_training import FEWSHOT_TRAINING
from catalog.analyses.influence import INFLUENCE
from catalog.analyses.natural_gradient import NATURAL_GRADIENT
from catalog.analyses.reconstruction import RECONSTRUCTION
from catalog.analyses.sensitivity import SENSITIVITY
from catalog.analyses.spectrum import SPECTRUM
from catalog.requests.job import JobDocument

ANALYSES: dict[str, Analysis] = {
    analysis.kind: analysis
    for analysis in (
        FACTORS,
        CAPACITY,
        RECONSTRUCTION,
        NATURAL_GRADIENT,
        COMPARE_CURVATURE,
        SPECTRUM,
        COMPRESSION,
        FEWSHOT_TRAINING,
        EXPORT,
        SENSITIVITY,
        INFLUENCE,
    )
}


def stages_of(kind: str) -> tuple[AnalysisStage, ...]:
    """Return the stages, at least one, that an analysis reports, in order.

    A kind that the menu does not list, such as an estimate, is its only stage.
    """
    listed = ANALYSES[kind].stages if kind in ANALYSES else ()
    return listed or (AnalysisStage(name=kind, planned=kind),)


_STAGES = tuple(stage for kind in ANALYSES for stage in stages_of(kind) if stage.planned is not None)
PLANNED_STAGES: tuple[str, ...] = (
    *("model", "collection", "correction"),
    *(str(stage.planned) for stage in _STAGES if stage.before_decomposition),
    "decomposition",
    *(str(stage.planned) for stage in _STAGES if not stage.before_decomposition),
)
"""The stages of a plan, in the order in which a job comes to them; those of the analyses in that of the menu."""

_KIND: Any = Literal[tuple(ANALYSES)]

DOCUMENT: type[JobDocument] = dataclasses.make_dataclass(
    "JobDocument",
    [
        ("kind", _KIND | tuple[_KIND, ...]),
        *(
            # records cannot change: one of the defaults serves all documents
            (kind, analysis.params, dataclasses.field(default_factory=cache(analysis.params)))
            for kind, analysis in ANALYSES.items()
            if analysis.params is not None
        ),
    ],
    bases=(JobDocument,),
    frozen=True,
    kw_only=True,
    namespace={"__doc__": JobDocument.__doc__, "__module__": __name__, "analyses": ANALYSES},
)
"""The job document with a block of options for every analysis: what is parsed and stored."""
