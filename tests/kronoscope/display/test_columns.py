"""Columns, figures and sentence of an analysis come from its record: those of the menu name fields that there are."""

import dataclasses
import io
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from rich.console import Console

from catalog import ANALYSES
from catalog.analyses.analysis import Column, Text
from catalog.responses.layer_record import LayerRecord, Observed
from kronoscope.client.responses import Layer, build_layer
from kronoscope.display.columns import layer_columns
from kronoscope.display.methods import computed
from kronoscope.display.tables import layer_table, summary_line
from tests.sharpness import ROW, SHARPNESS, SharpnessSummary

FIELD = re.compile(r"\{([\w.|]+)(?::[^}]*)?\}")


def printed(thing: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(thing)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return [line.rstrip() for line in text.splitlines()]


def test_a_new_analysis_is_shown_by_its_record_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ANALYSES, "sharpness", SHARPNESS)
    lines = printed(layer_table("sharpness", [build_layer(ROW)]))
    assert [cell.strip() for cell in lines[1].split("┃")] == ["layer", "parameters", "λ_max", "step"]
    assert [cell.strip() for cell in lines[3].split("│")] == ["head", "5,130", "12.5", "0.16"]
    summary = {"layers": 3, "largest_eigenvalue": 12.5}
    assert summary_line("sharpness", summary) == "sharpness: 3 layers; sharpness 12.5"
    assert summary_line("sharpness", summary | {"largest_eigenvalue": None}) == "sharpness: 3 layers"
    assert (
        computed("sharpness", {"sharpness": {"steps": 5}}) == "the largest eigenvalue of each layer's block by 5 steps"
    )
    assert computed("sharpness", {}).endswith("by 20 steps")


def test_an_analysis_that_names_nothing_is_shown_by_its_first_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = dataclasses.replace(SHARPNESS, columns=(), figures=(), sentence="")
    monkeypatch.setitem(ANALYSES, "sharpness", bare)
    lines = printed(layer_table("sharpness", [build_layer(ROW)]))
    assert [cell.strip() for cell in lines[1].split("┃")] == ["layer", "parameters", "largest_eigenvalue", "step"]
    assert summary_line("sharpness", {"layers": 3, "largest_eigenvalue": 12.5}) == "sharpness: 3 layers"
    assert computed("sharpness", {}) == "sharpness"


def at(hint: Any, path: str) -> Any:
    """The annotation at a path of an annotated record; None where there is no such field."""
    for step in path.split("."):
        hint = below(hint, step)
    return hint


def below(hint: Any, step: str) -> Any:
    """The annotation of a field, of a list's element or of a mapping's value."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for member in members:
        origin, inner = typing.get_origin(member), typing.get_args(member)
        if origin is Mapping:
            return inner[1]
        if origin is tuple:
            return inner[0] if step.isdigit() else below(inner[0], step)
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            return typing.get_type_hints(member).get(step)
    return None


def unknown(source: Any, paths: Iterable[Any]) -> list[str]:
    """The paths that name no field of an annotated record."""
    named = [way for path in paths if isinstance(path, str) for way in path.split("|")]
    return [way for way in named if at(source, way) is None]


def fields(*texts: Text | None) -> list[str]:
    return [
        path
        for text in texts
        for each in ([text] if isinstance(text, str) else text or ())
        for path in FIELD.findall(each)
    ]


@pytest.mark.parametrize("kind", ANALYSES)
def test_every_column_names_fields_of_the_row(kind: str) -> None:
    parts = [("metrics", ANALYSES[kind].metrics), ("record", LayerRecord), ("observed", Observed)]
    row = dataclasses.make_dataclass("Row", parts)
    for column in ANALYSES[kind].columns:
        assert column.short or column.heading
        # a function is for the terminal alone
        assert not (callable(column.value) and column.heading)
        source = row if column.each is None else at(row, f"{column.each.rpartition('.')[0]}.0")
        assert unknown(row, [column.each]) == []
        assert unknown(source, [column.value, column.counted, column.whole, *fields(column.note)]) == []


@pytest.mark.parametrize("kind", ANALYSES)
def test_every_figure_names_fields_of_the_summary(kind: str) -> None:
    for figure in ANALYSES[kind].figures:
        paths = fields(figure.name, figure.value, figure.note, figure.text, figure.line)
        assert paths
        source = ANALYSES[kind].summary
        assert unknown(source, [figure.each]) == []
        assert unknown(source if figure.each is None else at(source, f"{figure.each}.0"), paths) == []


def test_a_field_that_there_is_not_is_found() -> None:
    assert unknown(SharpnessSummary, ["layers", "layres", "layers.0"]) == ["layres", "layers.0"]
    assert unknown(ANALYSES["spectrum"].metrics, ["kfac.largest.0.value", "kfac.largest.0.valeu"]) == [
        "kfac.largest.0.valeu"
    ]


def test_a_heading_follows_the_length_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (
        Column("share", ("share", "share of {}"), each="metrics.parts.name"),
        Column("size", ("size", None), each="metrics.parts.name"),
    )
    monkeypatch.setitem(ANALYSES, "sharpness", dataclasses.replace(SHARPNESS, columns=columns))
    parts = [{"name": name, "share": 0.5, "size": size} for size, name in enumerate(("head", "stem", "body"))]
    rows = [
        Layer(**dict.fromkeys(Layer.__dataclass_fields__) | {"metrics": {"parts": parts[:count]}}) for count in (1, 3)
    ]
    assert [heading for heading, _ in layer_columns("sharpness", rows[:1])] == ["share", "size"]
    shown = layer_columns("sharpness", rows)
    assert [heading for heading, _ in shown] == ["share of head", "share of stem"]
    assert [show(rows[0]) for _, show in shown] == ["0.5", "–"]
