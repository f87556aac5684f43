"""Notebooks: what is public prints as a line or a small escaped table, names what is near, and reads torch's losses."""

import dataclasses
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronoscope.local
from catalog import ANALYSES
from catalog.brief import Brief, html_table
from catalog.requests.collection import Collection
from catalog.responses.views import JobView, ProgressView
from engine.factors.clipping.clipped_inverse import StabilisedLayers
from kronoscope.client import Client
from kronoscope.display.progress import LineDisplay
from kronoscope.local import Measurement, measure, operator
from kronoscope.local_views import NamedLayers

HOSTILE = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def measured() -> Measurement:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("head", nn.Linear(4, 4))
    model.add_module("act", nn.Tanh())
    model.add_module(HOSTILE, nn.Linear(4, 3))
    data = [(torch.randn(30, 4), torch.arange(30) % 3)]
    return measure(model, data, task="classification", kinds=("capacity", "spectrum"))


def shown(measured: Measurement) -> Iterator[Any]:
    rows = measured.of("capacity")
    yield from (measured, measured.factors, measured.factors["head"], rows, rows["head"], rows["head"].metrics)
    yield from (measured.summary["capacity"], measured.summary["spectrum"], operator(measured).inverse())
    yield from (Client("http://user:secret@127.0.0.1:8000", key="secret"), JOB)


BLANK: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(JobView))
JOB = JobView(
    **BLANK
    | {
        "id": HOSTILE,
        "state": "running",
        "kinds": ("capacity",),
        "document": {"name": "x" * 4000},
        "plan": {"y": "z" * 9999},
    }
    | {"progress": ProgressView(stage="collection", done=3, total=9, unit="batches", percent=33.0)}
)


def test_everything_prints_as_one_line_and_a_table_whose_text_is_escaped(measured: Measurement) -> None:
    for value in shown(measured):
        line = repr(value)
        assert "\n" not in line
        assert "object at 0x" not in line
        assert len(line) < 260
        assert "secret" not in line
        table = value._repr_html_() if hasattr(value, "_repr_html_") else ""
        assert HOSTILE not in table
        assert len(table) < 8000
    assert "&lt;script&gt;" in measured._repr_html_()
    assert "&lt;script&gt;" in JOB._repr_html_()
    assert "<JobView" not in repr(JOB)
    assert "stage='collection'" in repr(JOB)
    assert repr(Client("http://127.0.0.1:8000", key="secret")) == "<Client of http://127.0.0.1:8000, with a key>"
    assert "A 5×5, G 4×4" in repr(measured.factors["head"])


def test_each_metrics_and_summary_is_brief_and_a_long_table_is_cut() -> None:
    for analysis in ANALYSES.values():
        assert issubclass(analysis.metrics, Brief)
        assert issubclass(analysis.summary, Brief)
    table = html_table(("a",), [(str(place),) for place in range(500)])
    assert table.count("<tr>") == 61
    assert "and 440 more rows" in table


def test_a_missing_name_says_which_are_near(measured: Measurement) -> None:
    for names in (measured.factors, measured.of("capacity")):
        with pytest.raises(KeyError, match=r"no layer 'heed' has .*; did you mean `head`"):
            names["heed"]
        with pytest.raises(KeyError, match=r"no layer .*zzzzzz.* has .*; there are .*head"):
            names["zzzzzz"]
        assert "heed" not in names
    stored = NamedLayers("is stored as structures", {"conv": 1})  # as load_structures returns them
    with pytest.raises(KeyError, match="no layer 'cnv' is stored as structures; did you mean `conv`"):
        stored["cnv"]
    entry = {"name": "conv", "ordinal": 0, "holder_of_A": 0, "form": "kronecker", "sides": {}}
    stabilised = StabilisedLayers([entry], lambda _: {})  # as load_stabilised does
    with pytest.raises(KeyError, match="no layer 'cnv' is stabilised; did you mean `conv`"):
        stabilised["cnv"]
    assert repr(stabilised) == "<StabilisedLayers: 'conv'>"


def test_the_module_lists_its_own_names_alone() -> None:
    assert dir(kronoscope.local) == kronoscope.local.__all__ == sorted(kronoscope.local.__all__)
    for name in kronoscope.local.__all__:
        assert getattr(kronoscope.local, name).__module__.split(".")[0] in ("kronoscope", "engine")


def test_frames_have_a_row_for_each_row(measured: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = measured.of("capacity").to_frame()
    assert list(frame["layer"]) == ["head", HOSTILE]
    assert list(frame["trace"]) == [row.metrics.trace for row in measured.of("capacity").values()]
    assert len(measured.to_frame()) == len(measured.layers) == 4
    assert list(measured.factors.to_frame()["A rows"]) == [5, 5]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pandas is not installed; `pip install pandas`"):
        measured.to_frame()


class Axes:
    """What a figure's axes were asked for."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values, **_: self.calls.setdefault(name, []).append(values)


def test_figures_have_the_values_and_a_log_scale_where_they_need_it(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = measured.plot("trace", axes=Axes())
    ((places, values),) = axes.calls["plot"]
    assert list(places) == [0, 1]
    assert values == [row.metrics.trace for row in measured.of("capacity").values()]
    spread = max(values) / min(values)
    assert ("set_yscale" in axes.calls) == (spread >= 100)
    drawn = measured.factors["head"].plot(axes=Axes()).calls["plot"]
    for (_, values), side in zip(drawn, (measured.factors["head"].A, measured.factors["head"].G), strict=True):
        known = torch.linalg.eigvalsh(side.double()).flip(0)
        torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), known[: len(values)])
    with pytest.raises(ValueError, match="`metric` is 'trce', which no row has as a number; did you mean `trace`"):
        measured.of("capacity").plot("trce", axes=Axes())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib is not installed; `pip install matplotlib`"):
        measured.plot("trace")


CLASSES, NUMBERS = torch.arange(12) % 3, torch.linspace(0, 1, 36).reshape(12, 3)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(), CLASSES),
        (nn.CrossEntropyLoss(label_smoothing=0.2), CLASSES),
        (nn.CrossEntropyLoss(ignore_index=2), CLASSES),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1), CLASSES),
        (nn.functional.cross_entropy, CLASSES),
        (nn.BCEWithLogitsLoss(), NUMBERS),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), NUMBERS),
        (nn.MSELoss(), NUMBERS),
        (nn.functional.mse_loss, NUMBERS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)) if callable(value) else "",
)
def test_a_loss_of_torch_is_its_task(loss: Callable[[Tensor, Tensor], Tensor], targets: Tensor) -> None:
    """The Gauss-Newton of a model that is linear is the Hessian of that very loss over all examples."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3).double(), torch.randn(12, 4, dtype=torch.float64)
    wanted = targets if targets.dtype == torch.int64 else targets.double()
    of_loss = loss.double() if isinstance(loss, nn.Module) else loss

    def value(weight: Tensor, bias: Tensor) -> Tensor:
        return of_loss(nn.functional.linear(inputs, weight, bias), wanted)

    hessian: Any = torch.autograd.functional.hessian(value, (model.weight.detach(), model.bias.detach()))
    trace = torch.einsum("ijij->", hessian[0][0]) + torch.einsum("ii->", hessian[1][1])
    options = Collection(fisher="type2", dtype="float64")
    found = measure(model, [(inputs, wanted)], task=loss, kinds="capacity", collection=options)
    assert repr(found) == "<Measurement: capacity of 1 layer; 100.0% full block>"
    assert list(found.factors) == ["(model)"]
    assert found.of("capacity")["(model)"].record.exact_trace == pytest.approx(float(trace), rel=1e-9)


def test_progress_is_shown_by_itself_where_work_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = io.StringIO()
    monkeypatch.setattr(sys, "stderr", texts)
    model, data = nn.Linear(4, 3), [(torch.randn(12, 4), CLASSES)]
    measure(model, data, task="classification")
    assert texts.getvalue() == ""  # stderr is neither a terminal nor a notebook
    seen: list[str] = []
    measure(model, data, task="classification", report=lambda stage, *_: seen.append(stage))
    assert "collection" in seen

    from rich.console import Console  # noqa: PLC0415 - for this law alone

    quiet, loud = io.StringIO(), io.StringIO()
    LineDisplay(Console(file=quiet), quiet_seconds=60).update("collection", 1, 9, "batches")
    LineDisplay(Console(file=loud)).update("collection", 1, 9, "batches")
    assert quiet.getvalue() == ""
    assert loud.getvalue() == "collection: 1/9 batches\n"
