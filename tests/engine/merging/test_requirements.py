"""A merge counts every example once, and refuses by name what cannot be merged exactly."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.requests.inputs import Task
from catalog.requests.woodbury import Woodbury
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.errors import NothingToAnalyse, NotMergeable
from engine.factors.factor_set import FactorSet, Run
from engine.layers.coverage import DeclaredLayer
from engine.measurement.piece_storage import store_piece
from engine.merging.merge import merge_factor_sets
from engine.merging.part_files import read_part
from engine.workspace import Workspace
from tests.divided import difference, joining, piece, stored
from tests.oracles import MemoryArtifacts, workspace

EXAMPLES = 12


def job(seed: int = 0, bias: bool = True, policy: Any = "auto", smoothing: float = 0.0, **options: Any) -> Workspace:
    torch.manual_seed(4)
    x, y = torch.randn(EXAMPLES, 3), torch.randint(0, 4, (EXAMPLES,))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 4))
    made = workspace(model, [(x, y)], "classification", **{"batch_size": 2, "fisher": "empirical"} | options)
    made.inputs.examples = EXAMPLES
    made.options.woodbury = Woodbury(policy=policy)
    made.inputs.task = Task(type="classification", label_smoothing=smoothing)
    return made


def part(begin: int, end: int, make: Callable[[], Workspace] = job, whole: int | None = None) -> FactorSet:
    return read_part(stored(make, begin, end, whole))


def finished(made: Workspace) -> FactorSet:
    """The set that a finished job kept."""
    made.options.kinds = ("factors",)
    list(KeptFactors(None, made).rows())
    return read_part(made.ports.artifacts)


def refusal(sets: Sequence[FactorSet]) -> str:
    with pytest.raises(NotMergeable) as raised:
        merge_factor_sets(sets)
    return raised.value.message


def test_every_example_is_counted_once() -> None:
    first, second, third = part(0, 4), part(4, 10), part(10, 12)
    assert merge_factor_sets([first, second, third]).examples == EXAMPLES
    planted = refusal([first, second, third, second])
    assert "example 4 is in set 2 and in set 4" in planted
    left_out = refusal([first, third])
    assert "of 12 examples those from 4 to 9 are in no set" in left_out
    assert "the sets are over 10 examples, and are parts of 12" in refusal([first, second])
    assert "from 0 to 3 are in no set" in refusal([second, third])
    # where two examples have one index, positions alone would not show it
    assert second.counted is not None
    shifted = replace(second, counted=replace(second.counted, runs=(Run(begin=3, end=9),)))
    assert "example 3 is in set 1 and in set 2" in refusal([first, shifted, third])
    # nor would the indices, where a piece has read the examples of another and says otherwise
    assert first.counted is not None
    moved = replace(first, counted=replace(first.counted, runs=(Run(begin=50, end=54),), begin=4))
    assert "in two sets" in refusal([first, second, moved])


def test_a_piece_proves_what_it_has_read_not_what_it_was_told() -> None:
    made = piece(job, 4, 10)
    batches = made.inputs.batches
    assert batches is not None
    made.inputs.batches = lambda: ((x[:4], y[:4], index[:4]) for x, y, index in batches())
    store_piece(made)
    short = read_part(made.ports.artifacts)
    assert short.counted is not None
    assert short.counted.runs == (Run(begin=4, end=8),)
    assert "those from 8 to 9 are in no set" in refusal([part(0, 4), short, part(10, 12)])


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            partial(job, fisher="mc"),
            "`collection.fisher` must be the same in all sets (got 'empirical' in set 1 and 'mc'",
        ),
        (partial(job, smoothing=0.5), "`task.label_smoothing` must be the same in all sets (got 0.0 in set 1 and 0.5"),
        (partial(job, seed=1), "set 2 is of another model than set 1: its numbers have the digest"),
        (partial(job, bias=False), "other trainable parameters than set 1: 39 numbers, and 44 in set 1"),
        (partial(job, policy="dense"), "`woodbury.policy` must be the same in all sets"),
    ],
)
def test_sets_of_another_collection_are_refused(other: Callable[[], Workspace], expected: str) -> None:
    assert expected in refusal([part(0, 6), part(6, 12, other)])


def test_sums_of_products_of_another_precision_are_refused() -> None:
    first, second = part(0, 6), replace(part(6, 12), accumulation_fallback="TF32 is for CUDA devices")
    said = refusal([replace(first, accumulation_precision="tf32"), second])
    assert "(got `tf32` in set 1 and `ieee` in set 2, where TF32 is for CUDA devices)" in said


def test_what_is_no_sum_is_refused() -> None:
    averaged = partial(job, ema_decay=0.9)
    with pytest.raises(NotMergeable, match=r"`collection.ema_decay` is 0\.9: a moving average weighs examples"):
        collect_or_read(joining(averaged, [stored(averaged, 0, 6), stored(averaged, 6, 12)]))
    rounded = finished(job(storage_dtype="bfloat16"))
    assert "was rounded to `collection.storage_dtype: bfloat16`" in refusal([rounded])
    assert merge_factor_sets([replace(part(0, 6), task=None), part(6, 12, partial(job, smoothing=0.5))]).task is None
    old = finished(job())
    assert "does not say which examples" in refusal([replace(old, counted=None)])
    assert "does not say which examples" in refusal(
        [replace(old, layers=tuple(replace(layer, sums=None) for layer in old.layers))]
    )


class Drawing(nn.Module):
    """Dropout that evaluation does not switch off."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(x, 0.5, training=True))


def test_a_model_that_draws_numbers_is_refused() -> None:
    def make() -> Workspace:
        made = job(self_check="growing")
        torch.manual_seed(0)
        made.inputs.model = Drawing()
        return made

    sets = [part(0, 6, make), part(6, 12, make)]
    assert "draws random numbers in evaluation mode" in refusal(sets)
    assert merge_factor_sets([part(0, 12, make)]).examples == EXAMPLES


def test_a_piece_is_rounded_once_after_the_merge() -> None:
    narrow = partial(job, storage_dtype="float16", dtype="float32", policy="dense")
    exact = collect_or_read(partial(job, policy="dense")())
    found = collect_or_read(joining(narrow, [stored(narrow, 0, 6), stored(narrow, 6, 12)]))
    for layer in exact.layers:
        own, truth = found.load(layer.ordinal), exact.load(layer.ordinal)
        assert own.A.dtype == torch.float16
        # half a unit in the last of eleven bits, of the largest entry at most
        assert float((own.widened_A.double() - truth.widened_A).abs().max()) <= 2.0**-11 * float(truth.widened_A.max())


def test_coverage_is_judged_after_the_merge() -> None:
    # in the first piece no loss term reaches any layer
    make = partial(_half_ignored, 1.0)
    assert len(collect_or_read(joining(make, [stored(make, 0, 6), stored(make, 6, 12)])).layers) == 2
    with pytest.raises(NothingToAnalyse, match="no_gradient"):
        merge_factor_sets([part(0, 6, make, whole=6)])


def _half_ignored(min_coverage: float | None) -> Workspace:
    made = job(min_coverage=min_coverage)
    batches = made.inputs.batches
    assert batches is not None
    chunks = [(x, torch.where(torch.arange(EXAMPLES) < 6, -100, y)) for x, y in batches()]
    made.inputs.batches = lambda: iter(chunks)
    return made


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"policy": "dense", "batch_variance": True}], ids=str)
def test_a_finished_set_is_extended(options: dict[str, Any]) -> None:
    make = partial(job, **options)
    before = piece(make, 0, 8)
    before.inputs.part = None
    old = finished(before)
    assert old.counted is not None
    assert (old.counted.count, old.counted.whole) == (8, None)
    truth = collect_or_read(make())
    first = merge_factor_sets([old, part(8, 10, make, whole=10)])
    assert first.examples == 10
    whole = merge_factor_sets([old, part(8, 10, make), part(10, 12, make)])
    for layer, own in zip(truth.layers, whole.layers, strict=True):
        found, wanted = whole.load(layer.ordinal), truth.load(layer.ordinal)
        tolerance = 1e-12 if truth.collection.dtype == "float64" else 1e-6
        assert difference(found.widened_A, wanted.widened_A) <= tolerance
        assert difference(found.widened_G, wanted.widened_G) <= tolerance
        assert own.exact_trace == pytest.approx(layer.exact_trace, rel=1e-9)
    assert "those from 8 to 9 are in no set" in refusal([old, part(10, 12, make)])


def test_a_variance_is_over_the_batches_of_all_sets_or_null() -> None:
    """By numpy over single batches (``test_batch_variance.py``) the whole set's is right; a set may lack its sums."""
    for policy, kind in (("dense", "dense"), ("auto", "woodbury")):
        make = partial(job, policy=policy, batch_variance=True)
        before = piece(make, 0, 2)
        before.inputs.part = None
        old, truth = finished(before), collect_or_read(make())
        whole = merge_factor_sets([old, part(2, 6, make), part(6, 12, make)])
        again = merge_factor_sets([merge_factor_sets([old, part(2, 6, make, whole=6)]), part(6, 12, make)])
        assert (old.layers[0].representation_G, truth.layers[0].representation_G) == (kind, "dense")
        for found in (whole.layers[0], again.layers[0]):
            assert found.relative_variance_A == pytest.approx(truth.layers[0].relative_variance_A, rel=1e-9)
            if policy == "dense":
                assert found.relative_variance_G == pytest.approx(truth.layers[0].relative_variance_G, rel=1e-9)
                assert found.no_batch_variance is None
            else:
                assert (found.relative_variance_G, found.relative_standard_error_G) == (None, None)
                # of the first set's reasons, that of G alone: its one batch enters A
                assert str(old.layers[0].no_batch_variance).endswith(f"; {found.no_batch_variance}")
                assert str(found.no_batch_variance).startswith("G: no sum of it is made (woodbury)")


def test_a_set_without_sums_of_its_batches_leaves_no_variance() -> None:
    make = partial(job, policy="dense", batch_variance=True)
    first, second = part(0, 6, make), part(6, 12, make)
    facts = second.layers[0]
    assert facts.sums is not None
    overflown = replace(
        facts, sums=replace(facts.sums, variance_A=None), no_batch_variance="A: it is zero, or overflows"
    )
    found = merge_factor_sets([first, replace(second, layers=(overflown, *second.layers[1:]))]).layers[0]
    assert (found.relative_variance_A, found.no_batch_variance) == (None, "A: it is zero, or overflows")
    assert found.relative_variance_G is not None
    # batches that never called a layer have a G of zero, and a set of them alone has no sums of it
    row = DeclaredLayer(
        name=facts.name, module=facts.module, reason="never_routed", parameters=facts.parameters,
        parameter_count=facts.parameter_count,
    )  # fmt: skip
    uncalled = replace(second, layers=second.layers[1:], declared=(row,))
    found = merge_factor_sets([first, uncalled]).layers[0]
    assert found.relative_variance_A == first.layers[0].relative_variance_A
    assert (found.relative_variance_G, found.sums.variance_G if found.sums else 0) == (None, None)
    assert str(found.no_batch_variance).startswith("G: a set never called the layer")


def test_a_merged_set_is_stored_and_merged_again() -> None:
    made = joining(job, [stored(job, 0, 4, 8), stored(job, 4, 8, 8)])
    middle = finished(made)
    assert middle.counted is not None
    assert (middle.counted.runs, middle.counted.whole) == ((Run(begin=0, end=8),), None)
    truth, whole = collect_or_read(job()), merge_factor_sets([middle, part(8, 12)])
    for layer in truth.layers:
        found, wanted = whole.load(layer.ordinal), truth.load(layer.ordinal)
        assert difference(found.widened_G, wanted.widened_G) <= 1e-12


def test_two_merges_have_equal_digests() -> None:
    pieces: list[MemoryArtifacts] = [stored(partial(job, dtype="float32"), a, b) for a, b in ((0, 4), (4, 12))]
    indices = []
    for _ in range(2):
        made = joining(partial(job, dtype="float32"), pieces)
        finished(made)
        indices.append([layer["gradient_covariance"] for layer in made.ports.artifacts.load_json(
            "factors/factors.index.json")["layers"]])  # fmt: skip
    assert indices[0] == indices[1]
