"""What people watch of a running job, from its reports and its plan."""

from collections.abc import Mapping
from typing import Any

import pytest

from catalog.frames import LayerDone, Progress
from worker.supervision import job_progress
from worker.supervision.job_progress import ProgressView

PLAN = {"pace": "measured", "stages": {"collection": {"seconds": 100.0}, "capacity": {"seconds": 20.0}}}


def written(
    view: ProgressView, done: int, total: int | None, stage: str = "collection", **more: Any
) -> Mapping[str, Any]:
    shown = view.take(Progress(stage=stage, done=done, total=total, **{"unit": "batches", **more}))
    assert shown is not None
    return shown


def test_the_remaining_time_of_the_whole_job_is_written(monkeypatch: Any) -> None:
    clock = iter([0.0, 10.0, 60.0])
    monkeypatch.setattr(job_progress.time, "monotonic", lambda: next(clock))
    view = ProgressView(["capacity"], [], collects=True)
    view.take_plan(PLAN)
    assert written(view, 0, 50)["eta_seconds"] == 120.0
    assert written(view, 10, 50)["eta_seconds"] == 10 / 10 * 40 + 0.5 * 20
    assert written(view, 0, 4, "capacity")["eta_seconds"] == 0.5 * 20


def test_of_data_without_a_length_no_share_is_told() -> None:
    view = ProgressView(["capacity"], [], collects=True)
    view.take_plan(PLAN)
    shown = written(view, 1234, None)
    assert (shown["done"], shown["total"], shown["percent"], shown["eta_seconds"]) == (1234, None, None, None)
    assert written(view, 0, 4, "capacity")["percent"] == 83.3  # 100 of 120 planned seconds


def test_a_piece_of_queries_counts_those_that_are_scored() -> None:
    view = ProgressView(["capacity", "influence"], [], collects=False, work="score")
    view.take_plan(PLAN)
    assert written(view, 0, None, "model")["percent"] == 0
    assert written(view, 4, 8, "influence")["percent"] == job_progress.PIECE_SHARE / 2
    assert written(view, 8, 8, "influence")["percent"] == job_progress.PIECE_SHARE


def test_products_with_an_exact_curvature_take_most_of_a_spectrums_part() -> None:
    view = ProgressView(["capacity", "spectrum"], [], collects=True)
    view.take_plan({**PLAN, "search": {"length": 40, "columns": 8}})
    assert written(view, 4, 4, "spectrum")["percent"] == 86.5
    assert written(view, 50, 100, "products")["percent"] == 93.2
    assert written(view, 100, 100, "products")["percent"] == 100.0
    alone = ProgressView(["spectrum"], [], collects=True)
    alone.take_plan(PLAN)
    assert written(alone, 2, 4, "spectrum")["percent"] == 85.0


STAGES = {"collection": {"seconds": 60.0}, "capacity": {"seconds": 10.0}, "spectrum": {"seconds": 30.0}}
SEARCHED = {"pace": "measured", "stages": STAGES, "search": {"length": 40, "columns": 8}}


def again(**kept: float) -> ProgressView:
    """A later attempt at a job of 60, 10 and 30 seconds."""
    view = ProgressView(["capacity", "spectrum"], [], collects=True, kept=kept)
    view.take_plan(SEARCHED)
    return view


def test_what_a_checkpoint_holds_is_written_beside_what_is_done() -> None:
    view = again()
    assert "kept" not in written(view, 1, 10)
    shown = written(view, 5, 10, kept=True)
    assert shown["kept"] == {"stages": {"collection": 0.5}, "percent": 30.0}
    shown = written(view, 10, 10)
    assert (shown["percent"], shown["kept"]["percent"]) == (60.0, 30.0)


def test_a_later_attempt_begins_at_what_is_kept_and_goes_on_from_there() -> None:
    view = again(collection=0.5, products=0.4)
    kept = 0.5 * 60 + 0.4 * 30
    assert written(view, 0, None, "model")["percent"] == kept
    assert written(view, 5, 10)["percent"] == kept
    assert written(view, 10, 10)["percent"] == 60 + 0.4 * 30
    assert written(view, 4, 4, "capacity")["percent"] == 70 + 0.4 * 30
    assert written(view, 40, 100, "products")["percent"] == 70 + 0.4 * 30
    assert written(view, 100, 100, "products")["percent"] == 100


def test_a_checkpoint_that_was_not_found_counts_no_more() -> None:
    view = again(collection=0.5, products=0.4)
    assert written(view, 0, None, "data")["percent"] == 42.0
    shown = written(view, 1, 10)  # from the beginning
    assert (shown["percent"], shown["kept"]) == (18.0, {"stages": {"products": 0.4}, "percent": 12.0})
    shown = written(view, 10, 10)
    shown = written(view, 1, 100, "products")
    assert "kept" not in shown
    assert shown["percent"] == 70.3


@pytest.mark.parametrize(
    ("work", "stage"),
    [("collect", "collection"), ("correct", "correction"), ("decompose", "decomposition"), ("score", "influence")],
)
def test_each_kind_of_piece_says_how_far_it_is(work: Any, stage: str) -> None:
    view = ProgressView(["capacity", "influence"], [], collects=work != "score", work=work, kept={stage: 0.5})
    assert written(view, 1, 1, "data")["percent"] == job_progress.PIECE_SHARE / 2
    assert written(view, 3, 4, stage)["percent"] == pytest.approx(job_progress.PIECE_SHARE * 3 / 4, abs=0.05)


def row(kind: str, ordinal: int) -> LayerDone:
    return LayerDone(kind=kind, ordinal=ordinal, layer=f"layer{ordinal}", outcome={}, observed={})


def test_rows_after_the_last_report_are_written_at_the_end_of_their_analysis() -> None:
    view = ProgressView(["factors", "influence"], [], collects=True)
    for ordinal in range(3):
        view.take_layer(row("factors", ordinal))
        view.take(Progress(stage="factors", done=ordinal + 1, total=3, unit="layers"))
    assert view.rest() is None
    assert written(view, 40, 40, "influence", unit="queries")["layers_done"] == 3
    for ordinal in range(4):
        view.take_layer(row("influence", ordinal))
    shown = view.rest()
    assert shown is not None
    assert (shown["stage"], shown["layers_done"], shown["layers_total"]) == ("influence", 7, 7)
    assert view.rest() is None


def test_where_no_row_is_of_a_layer_none_is_counted() -> None:
    view = ProgressView(["fewshot_training"], [], collects=False)
    assert written(view, 3, 40, "training", unit="episodes")["layers_done"] is None
    view.take_layer(row("fewshot_training", 0))
    assert view.rest() is None
