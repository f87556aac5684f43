import io
import time
from typing import Any

import pytest
from rich.console import Console

from catalog.analyses.capacity_metrics import CapacityMetrics
from catalog.analyses.factors import FactorsMetrics
from catalog.analyses.natural_gradient import LayerDirection, NaturalGradientMetrics
from catalog.analyses.reconstruction import ReconstructedSide
from catalog.analyses.subsamples import NestedCapacity
from catalog.responses.device_views import DeviceView
from catalog.responses.layer_record import LayerRecord
from catalog.responses.views import JobView
from kronoscope.cli.job_commands import job_table
from kronoscope.cli.service_commands import device_table
from kronoscope.client.responses import build, build_layer
from kronoscope.display.layer_names import shorten, shorten_all
from kronoscope.display.numbers import format_number
from kronoscope.display.plan_tables import measured_stage_table
from kronoscope.display.progress import BarDisplay, Display, LineDisplay, display_for
from kronoscope.display.results import show_progress
from kronoscope.display.tables import layer_table, not_covered_lines, summary_line

ROW = {
    "kind": "capacity", "ordinal": 0, "layer": "encoder.layer.11.attention.self.query", "module": "Linear",
    "status": "covered", "reason": None, "parameters": ["weight"], "parameter_count": 147_840,
    "metrics": {"trace": 1.5, "effective_rank": 12.25, "effective_dimension": 33.0,
                "effective_dimension_share": 0.25, "kappa": None},
    "record": None, "observed": None,
}  # fmt: skip


def printed(thing: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    text = console.file.getvalue()
    assert isinstance(text, str)
    return text


def metrics_row(**changes: Any) -> Any:
    full = dict.fromkeys(CapacityMetrics.__dataclass_fields__)
    return build_layer(ROW | {"metrics": full | dict(ROW["metrics"])} | changes)  # type: ignore[call-overload]


def test_a_table_fits_a_hundred_columns_whatever_the_names() -> None:
    long = "module." * 30 + "weight\x1b[31m\n"
    rows = [
        metrics_row(),
        metrics_row(layer=long),
        metrics_row(status="declared", metrics=None, reason="no_gradient", layer="pooler"),
    ]
    text = printed(layer_table("capacity", rows))
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "\x1b" not in text
    assert not_covered_lines(rows) == ["not covered: pooler, 147,840 parameters, no_gradient: weight (Linear)"]
    assert "25.0%" in text
    assert "…" not in "".join(line.partition("│")[2] for line in text.splitlines())  # no figure is cut


@pytest.mark.parametrize(
    ("planned", "measured", "said"),
    [(0.07, 0.14, "+100%"), (0.5, 205.8, "×412"), (8.0, 4.0, "-50%"), (2.0, 3.0, "+50%"), (2.0, 62.0, "×31")],
)
def test_every_planned_duration_has_its_error(planned: float, measured: float, said: str) -> None:
    stage = {"stage": "collection", "planned_seconds": planned, "measured_seconds": measured,
             "error_seconds": measured / planned - 1}  # fmt: skip
    row = printed(measured_stage_table({"stages": [stage], "pace": "measured"})).splitlines()[-1]
    assert row.rpartition("│")[2].strip() == said
    # so has one that was too short to be shown beforehand
    *_, last = printed(measured_stage_table({"stages": [stage], "pace": "usual"})).splitlines()
    *_, foretold, _, error = last.split("│")
    assert foretold.strip().startswith(f"{planned:g} (")
    assert error.strip() == said


def test_the_whole_job_has_the_bounds_of_the_plan() -> None:
    """What its start took was known, so that they are narrower than a stage's."""
    whole = {"stage": "whole job", "planned_seconds": 6.0, "measured_seconds": 5.0, "error_seconds": -1 / 6}
    text = printed(measured_stage_table({"stages": [whole], "pace": "measured", "seconds_range": [5.0, 8.0]}))
    assert "6 (5 to 8)" in text.splitlines()[-1]


def test_the_stages_of_a_job_on_a_gpu_are_shown_whole_on_a_narrow_terminal() -> None:
    stage = {"stage": "collection"}
    for name, value in (("device_bytes", 123_456_789_012), ("host_bytes", 12_345_678_901), ("seconds", 1234.5)):
        stage |= {f"planned_{name}": value, f"measured_{name}": 1.3 * value, f"error_{name}": 0.3}
    text = printed(measured_stage_table({"stages": [stage], "pace": "usual"}), width=80)
    assert "…" not in text
    assert [name in text for name in ("planned", "measured", "error", "device", "host", "seconds")] == [True] * 6


def test_columns_that_a_narrow_terminal_has_no_room_for_are_named() -> None:
    for width in (40, 60, 80):
        console = Console(file=io.StringIO(), width=width)
        console.print(layer_table("capacity", [metrics_row(layer="conv")], width))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        heading = text.splitlines()[1]
        below = " ".join(text.partition("too narrow for ")[2].split())
        told = below.split(", ") if below else []
        asked = ["parameters", "A×G", "trace", "eff. rank", "eff. dim.", "share", "decay", "κ"]
        assert [name.strip() for name in heading.split("┃")] == ["layer", *asked[len(told) :]]
        assert told == asked[: len(told)]
        assert "…" not in text
        assert bool(told) == (width < 80)
    wide = printed(layer_table("capacity", [metrics_row(layer="conv")]))
    assert "too narrow" not in wide


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("width", [16, 24, 40])
@pytest.mark.parametrize(
    "pattern",
    ["transformer.decoder.blocks.{}.attention.query_projection.weight_parametrization.original.kernel",
     "model.language_model_with_a_long_name.projections.of_the_attention.number_{}",
     "backbone_of_the_{}_encoder.layer.attention.query_projection_with_a_very_long_name",
     "first.{}.a_middle_that_takes_more_room_than_any_terminal_would_have.last_{}", "x\x1b{}" + "y" * 80],
)  # fmt: skip
def test_sixty_names_that_differ_anywhere_are_shown_apart(pattern: str, width: int) -> None:
    names = [pattern.replace("{}", str(place)) for place in range(60)]
    shown = shorten_all(names, width)
    assert len(set(shown)) == 60
    assert all(len(text) <= width and text.isprintable() for text in shown)
    assert shorten_all([*names, names[0]], width)[-1] == shown[0]  # a name has one text
    rows = [metrics_row(layer=name, ordinal=place) for place, name in enumerate(names)]
    listed = [line.partition("│")[0] for line in printed(layer_table("capacity", rows)).splitlines()[3:]]
    assert len(set(listed)) == 60


def test_names_that_cannot_be_told_apart_by_a_part_are_numbered() -> None:
    long = [f"{first * 50}.{last * 50}" for first in "ab" for last in "ab"]
    assert len(set(shorten_all(long, 12))) == 4
    assert shorten_all(["a\x1b", "a\x07"], 12) == ["a�", "a�~2"]


def test_singular_and_unknown_conditions_have_words_of_their_own() -> None:
    for kappa, rank, said in ((None, 3, "∞"), (None, None, "–"), (12.5, 3, "12.5")):
        row = metrics_row(metrics=ROW["metrics"] | dict.fromkeys(CapacityMetrics.__dataclass_fields__) | {
            "trace": 1.5, "effective_rank": 2.0, "kappa": kappa, "rank": rank})  # type: ignore[operator]  # fmt: skip
        assert printed(layer_table("capacity", [row])).splitlines()[-1].rpartition("│")[2].strip() == said


def test_a_floor_that_was_missed_by_a_little_is_not_whole() -> None:
    said = {"layers": 1, "clipped": 1, "eigenvalues": 9, "kappa_max": 10.0, "floor_kept": 0.9996}
    assert "floor kept to 99.9%" in summary_line("reconstruction", said)
    assert "floor kept to 100.0%" in summary_line("reconstruction", said | {"floor_kept": 1.0})


def test_an_id_is_never_cut() -> None:
    job = {"id": "01a200b9-844c-77ac-8195-4c9bfab2d2e5", "kinds": ["factors", "capacity", "reconstruction"],
           "state": "succeeded", "document": {}, "created_at": "2026-01-02T03:04:05Z"}  # fmt: skip
    text = printed(job_table([build(JobView, job)], 200), width=200)
    assert job["id"] in text
    assert job["id"][-12:] in printed(job_table([build(JobView, job)]))
    assert "2026-01-02 03:04" in text


def test_a_list_of_jobs_names_model_data_and_duration() -> None:
    job = {"id": "01a200b9-844c-77ac-8195-4c9bfab2d2e5", "name": "first", "kinds": ["capacity"], "state": "failed",
           "document": {"model": {"source": "directory", "path": "m/bert"}, "data": {"source": "builtin", "name": "d"}},
           "started_at": "2026-01-02T03:04:05Z", "finished_at": "2026-01-02T05:14:05Z",
           "progress": {"percent": 41.0}}  # fmt: skip
    lines = printed(job_table([build(JobView, job)], 200), width=200).splitlines()
    assert [cell.strip() for cell in lines[-1].split("│")][1:] == [
        "first", "m/bert, d", "capacity", "failed", "", "2 h 10 min",
    ]  # fmt: skip
    running = job | {"state": "running", "finished_at": None}
    assert "running 41%" in printed(job_table([build(JobView, running)]))


def test_watching_says_which_job_how_far_and_how_long() -> None:
    console = Console(file=io.StringIO(), width=100)
    progress = {"stage": "collection", "done": 3, "total": 9, "unit": "batches", "percent": 41.0, "eta_seconds": 250.0}
    value = {"id": "01a200b9-844c-77ac-8195-4c9bfab2d2e5", "name": "first", "state": "running", "kinds": ["capacity"],
             "document": {}, "progress": progress}  # fmt: skip
    show_progress(build(JobView, value), LineDisplay(console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text == "first 4c9bfab2d2e5 41%, 4 min left · collection: 3/9 batches\n"


@pytest.mark.parametrize(
    ("failures", "said"),
    [(0, "running"), (1, "running, after 1 failed attempt"), (2, "running, after 2 failed attempts")],
)
def test_a_job_that_is_tried_again_says_so_and_how_far_it_is(failures: int, said: str) -> None:
    console = Console(file=io.StringIO(), width=100)
    value = {"id": "01a200b9-844c-77ac-8195-4c9bfab2d2e5", "name": "first", "state": "running", "kinds": ["capacity"],
             "document": {}, "failures": failures, "progress": {"percent": 38.0}}  # fmt: skip
    show_progress(build(JobView, value), LineDisplay(console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text == f"first 4c9bfab2d2e5 38% · {said}\n"


def test_layers_that_came_by_size_are_shown_in_the_models_order() -> None:
    text = printed(layer_table("capacity", [metrics_row(ordinal=place, layer=f"layer{place}") for place in (2, 0, 1)]))
    assert sorted(range(3), key=lambda place: text.index(f"layer{place}")) == [0, 1, 2]


def test_layers_that_are_no_plain_case_are_named() -> None:
    rows = [metrics_row(), *(metrics_row(status="zero_curvature", layer=str(place)) for place in range(14))]
    assert not_covered_lines(rows) == [f"zero_curvature: {', '.join(map(str, range(12)))} and 2 more"]


def test_more_layers_than_can_be_listed_are_told_by_reason() -> None:
    rows = [
        metrics_row(
            status="declared", metrics=None, reason=reason, layer=f"layers.{place}.{reason}", parameter_count=10
        )
        for place in range(7)
        for reason in ("bare_parameter", "no_gradient")
    ]
    assert not_covered_lines(rows) == [
        "not covered: 70 parameters, bare_parameter: layers.0.bare_parameter: weight (Linear); and 6 more",
        "not covered: 70 parameters, no_gradient: layers.0.no_gradient: weight (Linear); and 6 more",
    ]


@pytest.mark.parametrize(("covered", "share"), [(10_000, "100.0%"), (9_999, "99.9%"), (0, "0.0%"), (1, "0.0%")])
def test_what_is_not_whole_is_not_called_whole(covered: int, share: str) -> None:
    reasons = {} if covered == 10_000 else {"tied": 10_000 - covered - covered // 10, "no_gradient": covered // 10}
    coverage = {"covered_share": covered / 10_000, "trainable_parameters": 10_000, "reasons": reasons}
    line = summary_line("other", {"layers": 1, "coverage": coverage})
    assert f"; {share} of 10,000 trainable parameters covered" in line
    assert line.endswith("covered") == (covered == 10_000)


def test_one_layer_is_no_layers() -> None:
    assert printed(layer_table("capacity", [metrics_row()])).splitlines()[0].rstrip() == "capacity: 1 layer"
    assert summary_line("other", {"layers": 1}) == "other: 1 layer"
    assert summary_line("other", {"layers": 2}) == "other: 2 layers"


def test_names_keep_their_numbers_and_their_end() -> None:
    assert shorten("encoder.layer.11.attention.self.query", 28) == "e.l.11.attention.self.query"
    assert shorten("a.b.query", 28) == "a.b.query"
    assert len(shorten("a" * 60)) == 40


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (3, "3"), (12_345, "12,345"), (1.23456789, "1.235"), (1.2345e-12, "1.23e-12"), (10**9, "1e9")],
)
def test_numbers_are_short(value: Any, shown: str) -> None:
    assert format_number(value) == shown


def test_an_analysis_of_a_newer_service_is_shown_by_its_own_figures() -> None:
    row = build_layer(ROW | {"kind": "brand_new", "metrics": {"novelty": 0.5}})
    assert "novelty" in printed(layer_table("brand_new", [row]))
    assert "brand_new" in summary_line("brand_new", {"layers": 1})
    job = build(
        JobView, {"id": "1", "state": "queued", "kinds": ["x"], "document": {}, "unknown": 1, "progress": {"eta": 3}}
    )
    assert job.kinds == ("x",)


def test_plain_lines_come_at_a_stages_ends_only() -> None:
    out = io.StringIO()
    with LineDisplay(Console(file=out, width=100)) as display:
        display.update("model", 0, None, "models")
        for done in range(1, 101):
            display.update("collection", done, 100, "batches")
        display.update("collection", 100, 100, "batches")
    assert out.getvalue().splitlines() == ["model", "collection: 1/100 batches", "collection: 100/100 batches"]


def test_lines_and_bars_say_how_long_the_whole_job_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    LineDisplay(Console(file=out, width=100)).update("collection", 3, 100, "batches", 7805.0)
    assert out.getvalue() == "collection: 3/100 batches, job: 2 h 10 min left\n"
    out = io.StringIO()
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began)
    with BarDisplay(Console(file=out, width=140, force_terminal=True)) as display:
        monkeypatch.setattr(time, "monotonic", lambda: began + 2)
        display.update("collection", 3, 100, "batches", 7805.0)
    assert "job: 2 h 10 min left" in out.getvalue()


def test_bars_survive_unknown_totals_and_appear_only_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began)
    with BarDisplay(console) as display:
        display.update("model", 0, None, "models")
    assert out.getvalue() == ""
    with BarDisplay(console) as display:
        monkeypatch.setattr(time, "monotonic", lambda: began + 60)
        display.update("model", 0, None, "models")
        display.update("collection", 3, None, "batches")
        display.update("collection", 4, 7, "batches")
        display.line("[bold]not markup")
    assert "collection" in out.getvalue()
    assert "[bold]not markup" in out.getvalue()


def test_machines_hear_nothing() -> None:
    assert type(display_for(Console(file=io.StringIO()), silent=True)) is Display
    assert isinstance(display_for(Console(file=io.StringIO())), LineDisplay)


def test_nested_records_of_a_row_are_records_again() -> None:
    size = {"examples": 8, "trace": 1.5, "participation_ratio": 2.0, "effective_rank": None}
    row = metrics_row()
    assert row.metrics.nested is None
    full = {name: getattr(row.metrics, name) for name in vars(row.metrics)} | {"nested": [size]}
    assert metrics_row(metrics=full).metrics.nested == (NestedCapacity(**size),)  # type: ignore[arg-type]


def test_a_reconstruction_shows_what_was_clipped_and_whether_the_floor_was_kept() -> None:
    blank = dict.fromkeys(ReconstructedSide.__dataclass_fields__)
    side = blank | {"size": 4096, "kind": "matrix", "clipped": 244, "floor": 1e-6, "floor_reached": 0.9999e-6,
                    "kappa_reached": 1e6, "update": "clipped", "placement": "device", "rungs": ["device"]}  # fmt: skip
    lost = side | {"floor_reached": 0.66e-6, "placement": "host"}
    metrics = {"form": "kronecker", "kappa_max": 1e6, "shared_A_with": None, "artifact": None}
    rows = [
        build_layer(ROW | {"kind": "reconstruction", "metrics": metrics | {"A": side, "G": other}})
        for other in (side, lost, None)
    ]
    assert isinstance(rows[0].metrics.A, ReconstructedSide)
    assert rows[0].metrics.A.rungs == ("device",)
    lines = printed(layer_table("reconstruction", rows)).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert "244/4,096 │ 244/4,096 │ 1e6 │  kept │      device" in lines[3]
    assert "66% │ device/host" in lines[4]
    summary = {"layers": 3, "clipped": 732, "eigenvalues": 12288, "kappa_max": 1e6, "floor_kept": 0.66}
    assert summary_line("reconstruction", summary) == (
        "reconstruction: 3 layers; 732 of 12,288 eigenvalues clipped at κ_max 1e6; floor kept to 66.0%"
    )


def test_a_natural_gradient_shows_each_power_and_whom_to_trust() -> None:
    blank = dict.fromkeys(LayerDirection.__dataclass_fields__)
    whole = blank | {"power": 1.0, "norm": 12.5, "cosine": 0.1234, "inner": 3.0, "effective_step": 30.5,
                     "residual": 2.4e-7, "route": "rows", "largest_index": [3, 4]}  # fmt: skip
    half = whole | {"power": 0.5, "norm": 1.25, "cosine": None, "residual": None}
    metrics = dict.fromkeys(NaturalGradientMetrics.__dataclass_fields__) | {"gradient_norm": 0.1}
    rows = [build_layer(ROW | {"kind": "natural_gradient", "metrics": metrics | {"directions": [whole, half]}})]
    assert isinstance(rows[0].metrics.directions[0], LayerDirection)
    assert rows[0].metrics.directions[0].largest_index == (3, 4)
    lines = printed(layer_table("natural_gradient", rows)).splitlines()
    assert all(len(line) <= 100 for line in lines)
    for heading in ("‖d‖ α=1", "cos α=1", "step α=1", "residual", "‖d‖ α=0.5", "cos α=0.5"):
        assert heading in lines[1]
    assert lines[-1].strip() == "too narrow for parameters, ‖g‖"
    assert "0.123 │     30.5 │    2e-07 │      1.25 │         –" in lines[3]
    alone = [build_layer(ROW | {"kind": "natural_gradient", "metrics": metrics | {"directions": [whole]}})]
    assert "147,840 │ 0.1 │ 12.5 │ 0.123 │ 30.5 │    2e-07" in printed(layer_table("natural_gradient", alone))
    summary = {"layers": 1, "gradient_norm": 0.1, "uncovered_share": 0.25, "below_rounding": ["a"],
               "directions": [whole, half]}  # fmt: skip
    assert summary_line("natural_gradient", summary) == (
        "natural_gradient: 1 layer; ‖g‖ 0.1; α = 1: cosine 0.123, gᵀd 3; α = 0.5: cosine –, gᵀd 3; "
        "25.0% of ‖g‖² in parameters that are not covered, where there is no direction; "
        "λ below the precision of the factors in 1 layer"
    )


def test_what_has_not_converged_bears_a_star_and_is_said() -> None:
    row = metrics_row()
    full = {name: getattr(row.metrics, name) for name in vars(row.metrics)}
    late = {"metric": "effective_rank", "examples": [4, 8], "values": [9.0, 12.25], "extrapolation": 15.5}
    starred = full | {"convergence": [late | {"not_converged": True}]}
    arrived = full | {"convergence": [late | {"not_converged": False}]}
    assert "12.25*" in printed(layer_table("capacity", [metrics_row(metrics=starred)]))
    assert "12.25*" not in printed(layer_table("capacity", [metrics_row(metrics=arrived)]))
    said = {
        "layers": 3,
        "effective_rank": 12.25,
        "not_converged": {"effective_rank": 2},
        "model": {"effective_rank": 7},
    }
    line = summary_line("capacity", said)
    assert "effective rank 12.25 summed over layers, 7 of the model as a whole" in line
    assert "effective rank not converged in 2 layers (*)" in line
    assert "not converged" not in summary_line("capacity", said | {"not_converged": {"effective_rank": 0}})


def test_what_is_of_a_sketch_is_said_to_be() -> None:
    said = {"layers": 3, "effective_dimension": 7.5, "model": {"approximate": ("head",)}}
    assert "approximate, as a sketch stands for G of head" in summary_line("capacity", said)
    assert "approximate" not in summary_line("capacity", said | {"model": {"approximate": ()}})


def test_rows_stand_in_the_models_order_whatever_the_order_they_came_in() -> None:
    text = printed(layer_table("capacity", [metrics_row(ordinal=1, layer="last"), metrics_row(layer="first")]))
    assert text.index("first") < text.index("last")


def test_the_exact_curvature_stands_beside_kfacs() -> None:
    exact = {
        "trace": 47.2, "trace_low": 39.7, "trace_high": 56.2, "kronecker_trace": 29.96, "top_eigenvalue": 9.669,
        "top_converged": True, "kronecker_spectral_norm": 2.795,
    }  # fmt: skip
    line = summary_line("capacity", {"layers": 5, "cross_check": exact})
    assert "trace 29.96 where the exact one is 47.2 (39.7 to 56.2), largest eigenvalue 2.795 where it is 9.669" in line
    rough = summary_line("capacity", {"layers": 5, "cross_check": exact | {"top_converged": False}})
    assert "where it is at least 9.669" in rough
    bare = summary_line("capacity", {"layers": 5, "cross_check": exact | {"top_eigenvalue": None}})
    assert "eigenvalue" not in bare


def test_a_table_shows_what_was_asked_for() -> None:
    blank = dict.fromkeys(CapacityMetrics.__dataclass_fields__) | {"approximate": False}
    text = printed(layer_table("capacity", [metrics_row(metrics=blank | {"trace": 1.5, "participation_ratio": 8.25})]))
    assert "participation_ratio" in text
    assert "8.25" in text
    assert "approximate" not in text


@pytest.mark.parametrize(
    ("state", "status", "said"),
    [
        ("queued", "no_device", "no device can hold the job: needs 40 GB"),
        ("queued", "no_worker", "no worker can take the job up: needs 40 GB"),
        ("queued", "waiting", "queued: needs 40 GB"),
        ("queued", "reserved", "a device is reserved for the job: needs 40 GB"),
        ("running", "placed", None),
        ("running", "no_device", None),
    ],
)
def test_a_job_that_nobody_can_take_says_why(state: str, status: str, said: str | None) -> None:
    console = Console(file=io.StringIO(), width=100)
    placement = {"status": status, "message": "needs 40 GB", "device": None}
    value = {"id": "x", "state": state, "kinds": ["capacity"], "document": {}, "placement": placement}
    show_progress(build(JobView, value), LineDisplay(console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.splitlines()[1:] == ([] if said is None else [said])


def test_a_job_that_waits_for_its_pieces_shows_how_far_they_are() -> None:
    console = Console(file=io.StringIO(), width=100)
    piece = {"round": "collect", "index": 0, "count": 6, "id": "p", "state": "running", "progress": 12.5, "newer": 1}
    progress = {"stage": "collection", "done": 24, "total": 96, "unit": "examples"}
    value = {
        "id": "x",
        "state": "waiting",
        "kinds": ["capacity"],
        "document": {},
        "pieces": [piece],
        "progress": progress,
    }
    show_progress(build(JobView, value), LineDisplay(console))
    assert "collect, 6 pieces: 24/96 examples" in console.file.getvalue()  # type: ignore[attr-defined]


def test_devices_fit_a_hundred_columns() -> None:
    uuid = "GPU-5c1f7a3e-0d62-4a77-9a54-1f0f3c8d2b10"
    free = {"state": "free", "capacity_bytes": 150_754_820_096, "free_bytes": 0, "leased_bytes": 3 * 2**30}
    gpu = free | {"uuid": uuid, "kind": "cuda", "name": "NVIDIA H200", "node": "node-1", "reserved": True}
    host = free | {"uuid": "x", "kind": "host", "name": "[b]host[/b]", "node": "n" * 60, "state": "stale"}
    found = [build(DeviceView, gpu), build(DeviceView, host)]
    text = printed(device_table(found))
    assert max(map(len, text.splitlines())) <= 100
    for part in ("140.4", "3.0", "reserved", "stale", "[b]host[/b]", "NVIDIA H200"):
        assert part in " ".join(text.split())


def test_the_noise_of_factors_has_columns_where_a_layer_has_it() -> None:
    record = dict.fromkeys(LayerRecord.__dataclass_fields__)
    plain = ROW | {"kind": "factors", "metrics": dict.fromkeys(FactorsMetrics.__dataclass_fields__), "record": record}
    noisy = plain | {"record": record | {"relative_standard_error_A": 0.0123}}
    text = printed(layer_table("factors", [build_layer(noisy), build_layer(plain)]))
    assert "noise A" in text
    assert "0.0123" in text
    assert "noise G" not in text
    assert "noise" not in printed(layer_table("factors", [build_layer(plain)]))
