"""A comparison in the terminal: a column for each k, and one line that says how the two sets differ."""

from typing import Any

from catalog.analyses.compare_curvature import (
    CompareCurvatureMetrics,
    CompareCurvatureSummary,
    EigenspaceOverlap,
    MatrixComparison,
    MeanOverlap,
    OptionDifference,
    OtherSize,
)
from kronoscope.client.responses import Layer
from kronoscope.display.columns import layer_columns
from kronoscope.display.tables import summary_line


def compared(**numbers: Any) -> MatrixComparison:
    blank = dict.fromkeys(MatrixComparison.__dataclass_fields__)
    overlaps = (
        EigenspaceOverlap(k=1, overlap=0.25, gap=0.5, why=None),
        EigenspaceOverlap(k=7, overlap=None, gap=0.0, why="eigenvalues 7 and 8 …"),
    )
    return MatrixComparison(**blank | {"size": 4, "overlaps": overlaps} | numbers)  # type: ignore[arg-type]


def layer(metrics: Any) -> Layer:
    blank = dict.fromkeys(Layer.__dataclass_fields__)
    return Layer(**blank | {"kind": "compare_curvature", "ordinal": 0, "layer": "fc", "metrics": metrics})


def summary(**changes: Any) -> CompareCurvatureSummary:
    blank = dict.fromkeys(CompareCurvatureSummary.__dataclass_fields__)
    given: dict[str, Any] = {
        "layers": 3, "overlaps": (MeanOverlap(k=1, overlap=0.5, layers=3), MeanOverlap(k=7, overlap=None, layers=0)),
        "relative_distance": 0.25, "farthest": "head", "only_first": (), "only_against": (), "other_sizes": (),
        "differences": (), "against_sha256": "0" * 64,
    }  # fmt: skip
    return CompareCurvatureSummary(**blank | given | changes)


def test_there_is_a_column_for_each_k_and_a_dash_for_what_is_not_determined() -> None:
    blank = dict.fromkeys(CompareCurvatureMetrics.__dataclass_fields__)
    product = compared(relative_distance=0.5, cosine=0.75, divergence=12.5)
    rows = [
        layer(CompareCurvatureMetrics(**blank | {"G": compared(relative_distance=0.125), "product": product})),  # type: ignore[arg-type]
        layer(CompareCurvatureMetrics(**blank | {"why": "the set compared with has no layer of this name"})),  # type: ignore[arg-type]
    ]
    shown = [{heading: show(row) for heading, show in layer_columns("compare_curvature", rows)} for row in rows]
    assert shown[0] == {
        "A×G": "–", "k=1": "0.25", "k=7": "–", "distance": "0.5", "of A": "–", "of G": "0.125", "cosine": "0.75",
        "KL": "12.5",
    }  # fmt: skip
    assert set(shown[1].values()) == {"–"}


def test_the_summary_names_what_is_missing_and_how_the_two_were_collected() -> None:
    assert summary_line("compare_curvature", summary()).split("; ")[1:] == [
        "mean overlap of leading eigenspaces 0.5 at 1", "relative distance 0.25, farthest head",
    ]  # fmt: skip
    differing = summary(
        only_first=tuple(f"block.{place}" for place in range(7)),
        only_against=("pooler",),
        other_sizes=(OtherSize(layer="head", first="5×3 kronecker", against="5×9 kronecker"),),
        differences=(
            OptionDifference(option="fisher", first='"mc"', against='"empirical"'),
            OptionDifference(option="examples", first="8", against="16"),
        ),
    )
    assert summary_line("compare_curvature", differing).split("; ")[3:] == [
        "only in the first set: block.0, block.1, block.2, block.3, block.4 and 2 more",
        "only in the set compared with: pooler",
        "of another size: head",
        "collected with fisher mc against empirical, examples 8 against 16",
    ]
    assert summary_line("compare_curvature", {"layers": 2, "trace": 1.0}) == "compare_curvature: 2 layers"
