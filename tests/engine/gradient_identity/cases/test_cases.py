"""Models that mix examples are refused for a true reason; their twins are covered whole, with the right numbers.

Every model is measured once a run, with one of the larger batches in one precision, and one in four with batches of one
example too; the commit decides which. ``KRONOSCOPE_ALL_CASES=1`` measures every model in every way.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.engine.gradient_identity.cases.judge import judge
from tests.engine.gradient_identity.cases.oracle import find_truth
from tests.engine.gradient_identity.cases.pair import Model, Pair
from tests.engine.gradient_identity.cases.table import DTYPES, MODELS, PAIRS, SIZES

Way = tuple[int, str]

EVERY_WAY = [(size, dtype) for size in SIZES for dtype in DTYPES]
NOT_YET: dict[str, str] = {
    **dict.fromkeys(
        [
            "rare batch: gradients scaled on their way back",
        ],
        "this batch is not looked at",
    ),
}
"""Models that are judged wrongly in some way, with the reason."""


def commit() -> str:
    """The commit under test; the same every time where there is none."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def ways(model: Model, number: str) -> list[Way]:
    """The batch sizes and precisions that a run measures a model in."""
    if os.environ.get("KRONOSCOPE_ALL_CASES") or model.name in NOT_YET:
        return EVERY_WAY
    drawn = sha256(f"{number} {model.name}".encode()).digest()
    larger = [way for way in EVERY_WAY if way[0] > 1]
    single = [(1, DTYPES[drawn[1] % 2])] if drawn[2] % 4 == 0 else []
    return [larger[drawn[0] % len(larger)], *single]


def cases() -> Iterator[Any]:
    number = commit()
    for model in MODELS:
        reason = NOT_YET.get(model.name)
        marks = [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]
        yield pytest.param(model, ways(model, number), id=model.name, marks=marks)


@pytest.mark.part(of=64, by=("model.pair.kind", "model.is_twin"))
@pytest.mark.parametrize(("model", "chosen"), list(cases()))
def test_a_model_is_measured_rightly_or_refused_for_a_true_reason(model: Model, chosen: list[Way]) -> None:
    for size, dtype in chosen:
        verdict = str(judge(model, size, dtype))
        assert not verdict, f"batches of {size}, {dtype}: {verdict}"


def test_an_expert_that_no_text_of_the_first_batch_wants_is_looked_at_when_one_does() -> None:
    """Outputs are known to mix by then, so that they say nothing of the expert; the third batch calls it first."""
    (model,) = (each for each in MODELS if each.name == "experts: texts one by one")
    verdict = str(judge(model, 4, "float64"))
    assert not verdict, verdict


def test_every_kind_has_six_mechanisms() -> None:
    kinds = Counter(pair.kind for pair in PAIRS)
    assert len(kinds) == 8
    assert min(kinds.values()) >= 6
    assert len({model.name for model in MODELS}) == len(MODELS)


@pytest.mark.part(of=64, by=())
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.kind}: {pair.name}")
def test_one_of_a_pair_mixes_and_the_other_does_not(pair: Pair) -> None:
    for model in (Model(pair=pair, is_twin=False), Model(pair=pair, is_twin=True)):
        truth = find_truth(model, *model.data(), 8)
        off = max(truth.off.values())
        assert off < 1e-12 if model.is_twin else off > 1e-4
