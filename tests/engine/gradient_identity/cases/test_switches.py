"""Every part of the check is needed: without it at least three models of the table are judged wrongly."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest

from engine.gradient_identity.check import BatchCheck
from engine.gradient_identity.findings import Checked
from engine.gradient_identity.schedule import pick_examples
from engine.gradient_identity.self_check import SelfCheck
from engine.model.state.model_state import ModelState
from tests.engine.gradient_identity.cases.judge import judge
from tests.engine.gradient_identity.cases.table import MODELS


def without_glances(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SelfCheck, "glance_differs", lambda *_: False)
    patch.setattr(SelfCheck, "_check_others", lambda *_, **__: {})


def without_summed_batch(patch: pytest.MonkeyPatch) -> None:
    """Picked examples go through the model together, in place of the batch that is summed."""
    run = BatchCheck.run

    def run_few(check: BatchCheck) -> Checked:
        few = pick_examples(check.forward.batch, list(check.examples))
        return run(replace(check, forward=replace(check.forward, batch=few), examples=range(few.size), summed=None))

    patch.setattr(BatchCheck, "run", run_few)
    without_glances(patch)


def without_every_batch(patch: pytest.MonkeyPatch) -> None:
    """Batches 1, 2, 4, 8 … alone are looked at."""
    patch.setattr(SelfCheck, "_has_new_signature", lambda *_: False)
    without_glances(patch)


def without_exchange(patch: pytest.MonkeyPatch) -> None:
    """A model that draws is held to one forward pass."""
    beside = BatchCheck._beside_others
    patch.setattr(BatchCheck, "_beside_others", lambda *own, directed=False: None if directed else beside(*own))


def without_wider_types(patch: pytest.MonkeyPatch) -> None:
    """Narrow types that the model names stay narrow in the check that decides."""
    patch.setattr(BatchCheck, "_decided_widely", lambda *_: (None, ""))


def without_outputs(patch: pytest.MonkeyPatch) -> None:
    """Outputs that depend on other examples refuse nothing."""
    patch.setattr(BatchCheck, "_compare_outputs", lambda *_: None)
    patch.setattr(BatchCheck, "_compare_directions", lambda *_: None)


def without_model_state(patch: pytest.MonkeyPatch) -> None:
    """What a forward pass leaves in the model stays there."""
    patch.setattr(ModelState, "forward", lambda _: nullcontext())
    patch.setattr(ModelState, "restore", lambda _: None)


SWITCHES: list[tuple[Callable[[pytest.MonkeyPatch], None], Sequence[str]]] = [
    (
        without_summed_batch,
        (
            "whole batch: a trimmed mean",
            "whole batch: the fifth largest",
            "whole batch: signs that more than four share",
            "batch size: a bound of six examples",
        ),
    ),
    (
        without_every_batch,
        (
            "rare batch: bounds beside an outlier",
            "rare batch: turned round",
            "rare batch: a layer left out",
            "rare batch: some thousandths of the outputs",
        ),
    ),
    (
        without_exchange,
        (
            "draws: an anchor",
            "draws: stochastic depth",
            "draws: shares with Gumbel's noise",
            "draws: a jitter of 1e-7 before a maximum",
        ),
    ),
    (
        without_wider_types,
        (
            "narrow type: shares in half precision",
            "narrow type: counts in bfloat16",
            "narrow type: a rounded bias",
            "narrow type: a norm in float32",
        ),
    ),
    (
        without_outputs,
        (
            "outputs: the largest of each class",
            "outputs: the batch's own prior",
            "outputs: a bonus for the majority",
            "outputs: votes of the closest",
        ),
    ),
    (
        without_model_state,
        (
            "kept state: a counter, each example by itself",
            "kept state: a list that grows, each example by itself",
            "kept state: the last example's vector, each example by itself",
            "kept state: a plain tensor written in place, each example by itself",
        ),
    ),
]


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize(("switch", "names"), SWITCHES, ids=lambda value: getattr(value, "__name__", None))
def test_without_a_part_three_models_are_judged_wrongly(
    switch: Callable[[pytest.MonkeyPatch], None], names: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [model for model in MODELS if model.name in names]
    assert [str(judge(model, 8, "float64")) for model in models] == [""] * len(names)
    switch(monkeypatch)
    assert sum(bool(str(judge(model, 8, "float64"))) for model in models) >= 3
