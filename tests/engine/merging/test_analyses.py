"""Every analysis of stored factors says of merged pieces what it says of one collection."""

import math
import pkgutil
from collections.abc import Generator, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from catalog import ANALYSES
from catalog.analyses.analysis import LayerResult, most_decomposed
from engine.workspace import Workspace
from tests.divided import joining, stored
from tests.oracles import workspace

EXAMPLES = 12


def job() -> Workspace:
    torch.manual_seed(0)
    x, y = torch.randn(EXAMPLES, 4), torch.randint(0, 3, (EXAMPLES,))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    made = workspace(model, [(x, y)], "classification", fisher="mc", batch_size=2)
    made.inputs.examples = EXAMPLES
    return made


def finished() -> Workspace:
    """The undivided set, stored; and a job over it."""
    made = job()
    rows(made, "factors")
    later = job()
    later.inputs.model = later.inputs.batches = later.inputs.task = None
    later.inputs.stored = made.ports.artifacts
    return later


def divided() -> Workspace:
    return joining(job, [stored(job, begin, end) for begin, end in ((0, 2), (2, 10), (10, 12))])


def rows(made: Workspace, kind: str) -> dict[str, Any]:
    """Metrics of each layer, with all numbers of a job over ``made``."""
    made.options.kinds, made.options.keep = (kind,), ()
    record = ANALYSES[kind].params
    params = None if record is None else record()
    made.options.params = {kind: params}
    made.options.decomposition = most_decomposed([params or ANALYSES[kind]])
    analysis = pkgutil.resolve_name(ANALYSES[kind].implementation)
    found: Generator[LayerResult, None, Any] = analysis(params, made).rows()
    return {row.layer: asdict(row.metrics) for row in found if row.metrics is not None}


def numbers(value: Any, place: str = "") -> Mapping[str, float]:
    if isinstance(value, Mapping):
        return {k: v for name, own in value.items() for k, v in numbers(own, f"{place}/{name}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for at, own in enumerate(value) for k, v in numbers(own, f"{place}/{at}").items()}
    return {place: float(value)} if isinstance(value, (int, float)) and math.isfinite(value) else {}


@pytest.mark.parametrize("kind", ["factors", "capacity", "reconstruction", "spectrum", "natural_gradient"])
def test_an_analysis_of_pieces_is_that_of_the_whole(kind: str) -> None:
    found, truth = divided(), finished()
    for made in (found, truth):
        if kind == "natural_gradient":
            generator = torch.Generator().manual_seed(1)
            parameters = dict(job().inputs.model.named_parameters())  # type: ignore[union-attr] # there is one
            made.inputs.gradient = {
                name: torch.randn(each.shape, generator=generator) for name, each in parameters.items()
            }
    own, expected = numbers(rows(found, kind)), numbers(rows(truth, kind))
    # residuals, errors and bounds are rounding itself, and so are eigenvalues of zero, which a curve counts at its
    # small end
    rounding = ("residual", "error", "bound", "converged", "seconds", "curve", "log_", "smallest")
    told, others = ([name for name in each if not any(word in name for word in rounding)] for each in (own, expected))
    assert told == others
    assert len(own) >= 12
    assert len(told) > len(own) / 2
    for name in told:
        assert own[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-12), name
