"""Sensitivity against what happens: the predicted and the measured change of the loss, over layers and formats.

    python -P -m benchmarks.sensitivity [--nets digits_cnn tiny_gpt minilm]

Each layer's weights are put into each format by themselves, and the loss is measured on the same data: cross-entropy,
and of a sentence encoder the mean squared change of its embeddings. Ranks of both are compared (Spearman 1904).
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks import results_file
from benchmarks.cases.collection import encoder
from benchmarks.page_table import write_table
from catalog.analyses.sensitivity import SensitivityParams
from catalog.requests.inputs import BuiltinModel, Task
from engine.analyses.metrics.weight_formats import in_format
from kronoscope.local import Measurement, measure
from worker.execution.data.builtin import digits, english_bytes
from worker.execution.loader_context import LoaderContext
from worker.execution.models.builtin import CONTEXT, load

PAGE = Path(__file__).resolve().parents[1] / "docs" / "use.md"
PARAMS: dict[str, Any] = {"formats": ("int8", "int4", "int4_group", "fp8", "2:4"), "group": 32}
LEAST = 0.9
_EXAMPLES = {"digits_cnn": 1797, "tiny_gpt": 64}


@dataclass(frozen=True, kw_only=True)
class Net:
    """A trained net with data, and its loss on them."""

    model: nn.Module
    batches: list[tuple[Any, Tensor]]
    task: Any
    fisher: str
    loss: Callable[[], float]
    """The loss now; of an encoder the change of its embeddings since it was loaded."""


def _builtin(name: str, store: Path) -> nn.Module:
    source: Any = BuiltinModel(source="builtin", name=name)  # type: ignore[arg-type]
    return load(source, Task(type="classification"), LoaderContext(store=store)).model


def digits_cnn(store: Path) -> Net:
    """The convolutional net on digits."""
    model = _builtin("digits_cnn", store)
    images, classes = (each[: _EXAMPLES["digits_cnn"]] for each in digits())
    entropy = nn.functional.cross_entropy
    return Net(model=model, batches=[(images, classes)], task="classification", fisher="type2",
               loss=lambda: float(entropy(model(images).double(), classes)))  # fmt: skip


def tiny_gpt(store: Path) -> Net:
    """The language model of bytes; a token's class is the next byte."""
    model = _builtin("tiny_gpt", store)
    rows = english_bytes(CONTEXT + 1)[: _EXAMPLES["tiny_gpt"]]
    inputs, targets = rows[:, :-1], rows[:, 1:]
    entropy = nn.functional.cross_entropy
    return Net(model=model, batches=[(inputs, targets)], task={"type": "token_classification"}, fisher="mc",
               loss=lambda: float(entropy(model(inputs).double().flatten(0, 1), targets.flatten())))  # fmt: skip


def minilm(store: Path) -> Net:
    """The sentence encoder with its real weights, on paragraphs."""
    del store
    problem, (inputs, targets) = encoder()
    model = problem.model.eval()

    def pooled() -> Tensor:
        mask = inputs["attention_mask"][:, :, None].double()
        hidden = model(**inputs).last_hidden_state.double()
        return (hidden * mask).sum(1) / mask.sum(1)

    with torch.no_grad():
        before = pooled()
    return Net(model=model, batches=[(inputs, targets)], task="sentence_embedding", fisher="mc",
               loss=lambda: float((pooled() - before).square().mean()))  # fmt: skip


NETS: dict[str, Callable[[Path], Net]] = {"digits_cnn": digits_cnn, "tiny_gpt": tiny_gpt, "minilm": minilm}


@torch.no_grad()
def measured(net: Net, made: Measurement) -> list[dict[str, Any]]:
    """Return the predicted and the measured change of each layer in each format."""
    space = made.factors.collected
    named = dict(net.model.named_parameters())
    before, found = net.loss(), []
    for name, row in made.of("sensitivity").items():
        facts = next(facts for facts in space.layers if facts.name == name)
        whole = [window for window in facts.windows if window.left == 0 and window.height == facts.out_dim]
        if not row.metrics.changes or len(whole) != 1:
            continue
        (window,) = whole
        parameter = named[window.parameter]
        kept = parameter.detach().clone()
        view = parameter.view(-1).as_strided(window.shape, window.strides, window.offset)
        weights = view.reshape(window.height, window.width).double()
        # one vector of a table is a row of its parameter
        turned = facts.form == "diagonal"
        for change in row.metrics.changes:
            own = in_format(weights.mT.contiguous() if turned else weights, change.format, SensitivityParams(**PARAMS))
            view.copy_((own.mT if turned else own).reshape(view.shape))
            found.append(
                {"layer": name, "format": change.format, "predicted": change.predicted, "quadratic": change.quadratic,
                 "measured": net.loss() - before}
            )  # fmt: skip
            parameter.copy_(kept)
    return found


def correlation(rows: list[dict[str, Any]]) -> float:
    """Return Spearman's rank correlation of predicted and measured changes."""
    return float(spearmanr([row["predicted"] for row in rows], [row["measured"] for row in rows]).statistic)


def table(claims: list[dict[str, Any]], figures: dict[str, Any]) -> list[str]:
    """Return the page's table."""
    formats = PARAMS["formats"]
    lines = [f"| net | all | {' | '.join(formats)} |", "|---|" + "---:|" * (1 + len(formats))]
    for claimed, (name, own) in zip(claims, figures.items(), strict=True):
        each = own["rank_correlation_by_format"]
        cells = [claimed["value"], *(each[named] for named in formats)]
        lines.append(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return lines


def main() -> None:
    """Measure, and store the claims."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="*", choices=NETS, default=[*NETS])
    claims, figures = [], {}
    with tempfile.TemporaryDirectory() as store:
        for name in parser.parse_args().nets:
            net = NETS[name](Path(store))
            made = measure(net.model, net.batches, task=net.task, kinds="sensitivity",
                           collection={"fisher": net.fisher}, params={"sensitivity": PARAMS})  # fmt: skip
            rows = measured(net, made)
            each = {named: correlation([row for row in rows if row["format"] == named]) for named in PARAMS["formats"]}
            figures[name] = {"rank_correlation_by_format": each, "changes": rows}
            claims.append(
                results_file.claim(f"rank correlation over layers and formats, {name}", correlation(rows), LEAST,
                                   at_most=False)
            )  # fmt: skip
            print(name, f"{correlation(rows):.3f}", {key: round(value, 3) for key, value in each.items()}, flush=True)
    results_file.write("sensitivity", claims, figures)
    write_table(PAGE, "sensitivity", table(claims, figures))


if __name__ == "__main__":
    main()
