"""Sums: what the first batch leaves in A and G is held against its rows; faults of accumulation are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.accumulation import hooks, layer_statistics
from engine.accumulation.gradient_rows import GradientRows
from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection import data_pass, normalise
from engine.errors import NothingToAnalyse
from engine.gradient_identity import row_moments
from engine.gradient_identity.batch_sums import BatchSums
from engine.layers import coverage
from engine.layers.layer import Use, pooled_rows
from engine.layers.patch_moments import Patches
from engine.linalg import gram
from engine.model.mixed_precision import Precision
from tests.engine.gradient_identity.summed_models import KINDS, measured, refused
from tests.engine.rounded_products import ROUNDINGS, emulate

OPTIONS: dict[str, dict[str, Any]] = {
    "empirical": {},
    "type2, reduce": {"fisher": "type2", "sharing": "reduce"},
    "mc, rows": {"fisher": "mc", "policy": "all"},
    "float32, groups of two": {"dtype": "float32", "batch_size": 5},
    "forward_only": {"fisher": "forward_only"},
}


@pytest.mark.part(of=48, by=("kind",))
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_right_sums_are_held_and_stay_as_they_are(kind: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    differences: list[tuple[str, float, float, str]] = []
    plain = BatchSums.failed

    def failed(sums: BatchSums, examples: int) -> dict[str, tuple[float, str]]:
        for name, each in sums.layers.items():
            differences.extend((name, *found) for found in each.differences())
        return plain(sums, examples)

    monkeypatch.setattr(BatchSums, "failed", failed)
    with_check = measured(kind, **OPTIONS[options])
    assert not [row for row in with_check.declared if "sums" in row.why]
    assert {row.name for row in with_check.layers} <= {
        name + suffix for name, *_ in differences for suffix in _suffixes
    }
    assert not [each for each in differences if not each[1] <= each[2] / 10]
    without = measured(kind, **OPTIONS[options], self_check="off")
    digests = {row.name: (with_check.load(n).A, with_check.load(n).G) for n, row in enumerate(with_check.layers)}
    for number, row in enumerate(without.layers):
        if row.name in digests:
            A, G = digests[row.name]
            assert digest(A) == digest(without.load(number).A)
            assert digest(G) == digest(without.load(number).G)


_suffixes = ("", "[0]", "[1]")


def digest(side: Any) -> Any:
    return side.tolist() if isinstance(side, Tensor) else side.digest()


WAYS: dict[str, dict[str, Any]] = {
    "groups": {"micro_batch": 4},
    "first batch alone": {"self_check": "first"},
    "every other batch": {"update_freq": 2, "batch_size": 2},
    "moving average": {"ema_decay": 0.5, "batch_size": 2},
    "variance": {"batch_variance": True, "batch_size": 2},
    "two passes": {"parts": (("a",), ("h",))},
    "sketch": {"sketched": ("h",), "fisher": "mc"},
    "sketch of gradients": {"sketched": ("h",)},
    "rows": {"policy": "all", "fisher": "mc"},
}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("way", WAYS)
def test_right_sums_are_held_however_the_data_pass(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []
    plain = BatchSums.failed

    def failed(sums: BatchSums, examples: int) -> dict[str, tuple[float, str]]:
        held.extend(name for name, each in sums.layers.items() if list(each.differences()))
        return plain(sums, examples)

    monkeypatch.setattr(BatchSums, "failed", failed)
    assert not measured("linear", **WAYS[way]).declared
    assert sorted(held) == ["a", "h"]


@pytest.mark.part(of=32, by=("rounding",))
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_rounded_rows_are_held_within_their_rounding(
    kind: str, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, ROUNDINGS[rounding])
    narrow = {"dtype": "float32", "precision": "tf32"}
    for options in (narrow, narrow | {"fisher": "type2", "sharing": "reduce"}):
        assert not refused(kind, **options)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_tolerance_of_full_width_would_refuse_rounded_rows(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, ROUNDINGS[rounding])
    monkeypatch.setattr(Precision, "sums_rounding", 0.0)
    assert refused("linear", dtype="float32", precision="tf32")


def test_a_fault_in_a_later_pass_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_gradients(monkeypatch)
    with pytest.raises(NothingToAnalyse, match="sums of the gradient identity"):
        measured("linear", parts=(("a",), ("h",)), self_check="first")


# ---- faults


def scaled_gradients(patch: pytest.MonkeyPatch) -> None:
    """G of the mean loss, and not multiplied back."""
    plain = LayerStatistics._add_rows_
    patch.setattr(LayerStatistics, "_add_rows_", lambda own, rows: plain(own, rows / 6**0.5))


def doubled_positions(patch: pytest.MonkeyPatch) -> None:
    def add_input_(own: LayerStatistics, use: Use) -> None:
        plain(own, use)
        own.weight_A += use.examples

    plain = LayerStatistics.add_input_
    patch.setattr(LayerStatistics, "add_input_", add_input_)


def doubled_terms(patch: pytest.MonkeyPatch) -> None:
    def end_batch_(own: LayerStatistics, *shares: Any) -> None:
        own.weight_G *= 2
        plain(own, *shares)

    plain = LayerStatistics.end_batch_
    patch.setattr(LayerStatistics, "end_batch_", end_batch_)


def second(method: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Every second call of a layer is dropped."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain: Any = getattr(LayerStatistics, method)
        calls: dict[int, int] = {}

        def every_other(own: LayerStatistics, *given: Any) -> None:
            calls[id(own)] = calls.get(id(own), 0) + 1
            if calls[id(own)] % 2:
                plain(own, *given)
            elif method == "add_gradient_":
                own.gradients += 1

        patch.setattr(LayerStatistics, method, every_other)

    return plant


def dropped_group(patch: pytest.MonkeyPatch) -> None:
    plain = data_pass.parts_of

    def all_but_the_last(*given: Any) -> Any:
        return iter(list(plain(*given))[:-1])

    def enter(*given: Any) -> int:
        patch.setattr(data_pass, "parts_of", all_but_the_last)
        try:
            return whole(*given)
        finally:
            patch.setattr(data_pass, "parts_of", plain)

    # the first check is before that
    whole = data_pass._varied
    patch.setattr(data_pass, "_varied", enter)


def stale_triangle(patch: pytest.MonkeyPatch) -> None:
    for module in (normalise, row_moments):
        patch.setattr(module, "mirrored_", lambda matrix: matrix)


def stale_strips(patch: pytest.MonkeyPatch) -> None:
    """The lower triangle is summed, and the upper one left."""
    plain = gram.add_gram_
    patch.setattr(layer_statistics, "add_gram_", lambda total, rows, way=None: plain(total.mT, rows, way).tril_())


def narrow(dtype: torch.dtype) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = gram.add_gram_
        patch.setattr(
            layer_statistics,
            "add_gram_",
            lambda total, rows, way=None: plain(total, rows.to(dtype).to(total.dtype), way),
        )

    return plant


def no_column(patch: pytest.MonkeyPatch) -> None:
    """The column beside the inputs stays zero."""
    patch.setattr(LayerStatistics, "_add_small_", lambda own, total, numbers: None)


def summed_in_place_of_averaged(patch: pytest.MonkeyPatch) -> None:
    plain = pooled_rows

    def summed(rows: Tensor, use: Use) -> tuple[Tensor, int]:
        means, positions = plain(rows, use)
        return means * (rows.shape[0] // use.examples), positions

    patch.setattr(layer_statistics, "pooled_rows", summed)


def other_patches(patch: pytest.MonkeyPatch) -> None:
    """Patches with their channels and places exchanged."""
    plain = Patches.add_gram_

    def add_gram_(own: Patches, total: Tensor, staging: Any = None) -> None:
        plain(own, total, staging)
        total.copy_(total.triu() + total.triu(1).mT)
        total.copy_(total.flip(-1, -2))

    patch.setattr(Patches, "add_gram_", add_gram_)


def lost_row(patch: pytest.MonkeyPatch) -> None:
    plain = GradientRows._keep_
    patch.setattr(GradientRows, "_keep_", lambda own, rows: plain(own, rows[1:]))


def uncounted_ids(patch: pytest.MonkeyPatch) -> None:
    plain = torch.bincount
    patch.setattr(torch, "bincount", lambda ids, minlength=0: plain(ids, minlength=minlength).clamp(max=1))


def cut_to_real(patch: pytest.MonkeyPatch) -> None:
    """What stands before the sums lets complex rows through, and they are cast to the sums' precision."""
    patch.setattr(coverage, "_unmeasured", lambda parameter: None if parameter.numel() else "no_numbers")
    patch.setattr(hooks, "hidden_by", lambda *tensors: None)
    for module in (gram, layer_statistics):
        patch.setattr(module, "require_real", lambda rows: rows)


FAULTS: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "G not multiplied back": ("linear", "a, h", scaled_gradients, {}),
    "G not multiplied back, rows kept": ("linear", "a", scaled_gradients, {"policy": "all", "fisher": "mc"}),
    "positions counted twice": ("linear", "a, h", doubled_positions, {}),
    "terms counted twice": ("linear", "a, h", doubled_terms, {}),
    "input of a second call dropped": ("called twice", "a", second("add_input_"), {}),
    "gradient of a second call dropped": ("called twice", "a", second("add_gradient_"), {}),
    "a group dropped": ("linear", "a, h", dropped_group, {"micro_batch": 2}),
    "a group's gradients dropped": ("linear", "a, h", second("add_gradient_"), {"micro_batch": 3}),
    "a triangle that is not mirrored": ("linear", "a, h", stale_triangle, {}),
    "a triangle that is not mirrored, of many rows": ("wider than what is mirrored", "a", stale_triangle, {}),
    "the other triangle": ("wider than what is mirrored", "a", stale_strips, {}),
    "bfloat16 in float32": ("linear", "a, h", narrow(torch.bfloat16), {"dtype": "float32"}),
    "float32 in float64": ("linear", "a, h", narrow(torch.float32), {}),
    "no column of ones": ("linear", "a, h", no_column, {}),
    "no column of ones beside patches": ("convolution", "a", no_column, {}),
    "summed and not averaged": ("positions", "a, h", summed_in_place_of_averaged, {"sharing": "reduce"}),
    "patches in another order": ("convolution", "a", other_patches, {}),
    "a row of many lost": ("linear", "a", lost_row, {"policy": "all", "fisher": "mc"}),
    "complex rows cut to their real part": ("complex", "a", cut_to_real, {"batch_size": 1, "dtype": "float32"}),
    "ids counted once": ("embedding, ignored targets", "e", uncounted_ids, {}),
    "ids of a tied table counted once": ("tied head", "table", uncounted_ids, {}),
}


ROUNDED = (
    "G not multiplied back", "positions counted twice", "input of a second call dropped", "a group dropped",
    "a triangle that is not mirrored, of many rows", "the other triangle", "no column of ones",
    "patches in another order",
)  # fmt: skip


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("name", ROUNDED)
def test_a_fault_is_refused_beside_rounded_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, ROUNDINGS["cut"])
    kind, layers, plant, options = FAULTS[name]
    plant(monkeypatch)
    found = refused(kind, **options | {"dtype": "float32", "precision": "tf32"})
    assert set(layers.split(", ")) <= set(found.split(", ")) or "no layer of the model" in found


@pytest.mark.part(of=16, by=())
@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_planted_into_the_sums_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, layers, plant, options = FAULTS[name]
    assert not refused(kind, **options)
    plant(monkeypatch)
    found = refused(kind, **options)
    assert found
    assert set(layers.split(", ")) <= set(found.split(", ")) or "no layer of the model" in found
