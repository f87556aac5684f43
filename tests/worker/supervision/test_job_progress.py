"""What people watch of a running job, from its reports and its plan."""

from collections.abc import Mapping
from typing import Any

from catalog.frames import Progress
from worker.supervision import job_progress
from worker.supervision.job_progress import ProgressView

PLAN = {"pace": "measured", "stages": {"collection": {"seconds": 100.0}, "capacity": {"seconds": 20.0}}}


def written(view: ProgressView, done: int, total: int | None, stage: str = "collection") -> Mapping[str, Any]:
    shown = view.take(Progress(stage=stage, done=done, total=total, unit="batches"))
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
    view = ProgressView(["capacity", "influence"], [], collects=False, piece=True)
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
