"""The table of curvatures: one row each, bounds and intervals beside what they are of."""

import io
from typing import Any

from rich.console import Console

from catalog.analyses.spectrum_metrics import BoundedEigenvalue, CurvatureSpectrum
from catalog.record import plain
from kronoscope.client.responses import build_layer
from kronoscope.display.results import curvature_table, missing_lines
from kronoscope.display.tables import layer_table


def printed(thing: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def curvature(of: str, top: float, bottom: float, bound: float | None, **changes: Any) -> CurvatureSpectrum:
    ends = {
        name: (BoundedEigenvalue(value=value, bound=bound, converged=changes.get("converged", True)),)
        for name, value in (("largest", top), ("smallest", bottom))
    }
    values: dict[str, Any] = {
        "of": of, "dimension": 10_026, **ends, "trace": 12.05, "trace_low": None, "trace_high": None,
        "negative_share": None, "negative_low": None, "negative_high": None, "density": None, "missing": {},
        "products": 0, "passes": 0,
    }  # fmt: skip
    changes.pop("converged", None)
    return CurvatureSpectrum(**values | changes)


KFAC = curvature("kfac", 0.7211, 0.0, None)
HESSIAN = curvature(
    "hessian", 2.815, -0.0314, 0.005, trace_low=11.5, trace_high=12.5, negative_share=0.301, products=641
)


def test_each_curvature_has_a_row_whether_a_record_or_what_a_service_sent() -> None:
    for summary in ({"curvatures": (KFAC, HESSIAN)}, plain({"curvatures": (KFAC, HESSIAN)})):
        text = printed(curvature_table(summary))
        assert all(len(line) <= 100 for line in text.splitlines())
        kfac, hessian = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("K-", "Hes"))
        assert [cell.strip() for cell in kfac.split("│")] == [
            "K-FAC", "0.7211", "–", "0", "–", "12.05", "–", "–", "–",
        ]  # fmt: skip
        assert [cell.strip() for cell in hessian.split("│")] == [
            "Hessian", "2.815", "0.005", "-0.0314", "0.005", "12.05", "11.5 to 12.5", "30.1%", "641",
        ]  # fmt: skip
        assert "10,026 parameters" in text
        assert "*" not in text


def test_what_was_not_asked_for_has_no_column() -> None:
    bare = curvature("ekfac", 1.0, 0.0, None, smallest=None, trace=None)
    text = printed(curvature_table({"curvatures": (bare,)}))
    assert "λ_min" not in text
    assert "95%" not in text
    assert "EK-FAC" in text


def test_a_bound_that_is_too_wide_is_marked() -> None:
    text = printed(curvature_table({"curvatures": (curvature("ggn", 2.0, 0.0, 0.4, converged=False),)}))
    assert "2*" in text
    assert "spectrum.most_products" in text


def test_what_is_missing_is_said_with_its_reason() -> None:
    why = "`head`: G (60,000 rows) is too large"
    lacking = curvature("kfac", 1.0, 0.0, None, largest=None, missing={"largest": why, "density": why})
    assert missing_lines({"curvatures": (lacking, HESSIAN)}) == [f"K-FAC without largest, density: {why}"]
    assert curvature_table({"curvatures": ()}) is None


def test_a_layer_shows_its_outermost_eigenvalues() -> None:
    spectrum = {
        "trace": 5.07, "largest": [{"value": 0.72, "bound": None, "converged": True}],
        "smallest": [{"value": 0.0, "bound": None, "converged": True}], "zeros": 0, "density": None,
    }  # fmt: skip
    metrics = {
        "form": "kronecker", "dimension": 5130, "kfac": spectrum, "ekfac": None, "no_spectrum": {}, "estimated": None,
    }  # fmt: skip
    row = {
        "kind": "spectrum", "ordinal": 0, "layer": "head", "module": "Linear", "status": "covered", "reason": None,
        "parameters": ["head.weight"], "parameter_count": 5130, "metrics": metrics, "record": None, "observed": None,
    }  # fmt: skip
    text = printed(layer_table("spectrum", [build_layer(row)]))
    (line,) = [line for line in text.splitlines() if line.startswith("head")]
    assert [cell.strip() for cell in line.split("│")] == ["head", "5,130", "–", "5.07", "0.72", "0", "0"]
    corrected = row | {"metrics": metrics | {"kfac": None, "ekfac": spectrum | {"trace": 4.0}}}
    assert " 4 " in printed(layer_table("spectrum", [build_layer(corrected)]))
    absent = row | {"metrics": metrics | {"kfac": None}}
    assert printed(layer_table("spectrum", [build_layer(absent)])).count("–") >= 4
