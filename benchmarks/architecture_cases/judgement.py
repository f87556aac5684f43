"""The judgement of one architecture: what a collection says of each layer, against the oracle."""

import contextlib
import copy
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architecture_cases.case import BATCH_SIZE, Builder, Case, trainable, widened
from benchmarks.architecture_cases.oracle import Truth, activation_factor, gradient_factor, truth
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from catalog.requests.woodbury import Woodbury
from engine.collect import collect_or_read
from engine.errors import EngineError
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace

TOLERANCE = 1e-8
"""Relative error up to which a number counts as right."""
NEGLIGIBLE = 1e-22
"""Share of the model's trace that is rounding: a key's bias has no curvature, and neither number means anything."""
UNREACHED = ("no_gradient", "never_routed")
"""Reasons that say that no gradient arrives, which the oracle can contradict."""
_SLICE = re.compile(r"^(.*)\[(\d+)(?::(\d+))?\]$")


class NoArtifacts:
    """Artifacts of a collection that keeps none."""

    def save_tensors(self, name: str, tensors: Any, metadata: Any) -> None:  # noqa: ANN401 - unused
        """Drop them."""

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Nothing is there."""
        raise FileNotFoundError(name)

    def save_json(self, name: str, value: object) -> None:
        """Drop it."""

    def load_json(self, name: str) -> Any:  # noqa: ANN401 - nothing
        """Nothing is there."""
        raise FileNotFoundError(name)

    def remove(self, name: str) -> None:
        """Nothing is there."""


@dataclass
class Worst:
    """Errors found so far, by layer and quantity."""

    errors: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, layer: str, quantity: str, found: Tensor, expected: Tensor, floor: float = 0.0) -> None:
        """Compare, relative to what is expected."""
        if found.shape != expected.shape:
            self.errors[layer, f"{quantity} has shape {tuple(found.shape)}, not {tuple(expected.shape)},"] = float(
                "inf"
            )
            return
        size = max(float(expected.norm()), floor)
        error = float((found - expected).norm()) / size if size else float(found.norm())
        self.errors[layer, quantity] = error if error == error else float("inf")  # noqa: PLR0124 - a NaN is wrong


def judged(build: Builder, **options: Any) -> dict[str, Any]:  # noqa: ANN401 - the collection's own
    """One row of the table: the collection of ``build``'s case against the oracle.

    Args:
        build: Makes the case, the same one each time.
        options: Options of the collection.
    """
    torch.manual_seed(0)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case = build()
            with widened():
                expected = None if case.random else truth(case)
        except ModuleNotFoundError as error:
            return {"verdict": "not installed", "message": str(error)}
        except Exception as error:  # noqa: BLE001 - a case that its package's version cannot build
            return {"verdict": "no case", "message": f"{type(error).__name__}: {str(error)[:300]}"}
        parameters = {id(each): each for each in trainable(case.model).values()}
        numbers = sum(each.numel() for each in parameters.values())
        row: dict[str, Any] = {"class": type(case.model).__name__, "trainable": numbers}
        with widened():
            try:
                whole = _collected(case, **options)
            except EngineError as error:
                row |= {"verdict": "refused", "message": f"{type(error).__name__}: {error}"}
            except Exception as error:  # noqa: BLE001 - a crash is a row of the table
                row |= {"verdict": "crashed", "message": f"{type(error).__name__}: {str(error)[:300]}"}
            else:
                row |= judgement(case, whole, expected, numbers)
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def _collected(case: Case, **options: Any) -> FactorSet:  # noqa: ANN401 - the collection's own
    model = copy.deepcopy(case.model) if case.random else case.model
    chosen = {"batch_size": BATCH_SIZE if case.alone else len(case.targets)} | options
    return collected(model, lambda: iter([(case.inputs, case.targets)]), case.task, case.loss, **chosen)


def collected(
    model: nn.Module,
    batches: Callable[[], Any],
    task: str,
    loss: str | None = None,
    **options: Any,  # noqa: ANN401 - the collection's own
) -> FactorSet:
    """Collect the curvature of a model in float64, without keeping anything."""
    chosen = {"fisher": "empirical", "dtype": "float64", "batch_size": BATCH_SIZE}
    return collect_or_read(
        Workspace(
            inputs=ModelInputs(model=model, batches=batches, task=Task(type=task, loss=loss)),
            options=JobOptions(collection=Collection(**(chosen | options)), woodbury=Woodbury(policy="dense")),
            ports=Ports(artifacts=NoArtifacts()),
        )
    )


def judgement(case: Case, whole: FactorSet, expected: Truth | None, numbers: int) -> dict[str, Any]:
    """Return what a collection says of each layer, against the oracle."""
    reasons: dict[str, int] = defaultdict(int)
    for layer in whole.declared:
        reasons[layer.reason] += layer.parameter_count
    row: dict[str, Any] = {
        "layers": len(whole.layers),
        "covered": whole.covered_parameters / numbers,
        "reasons": {reason: count / numbers for reason, count in sorted(reasons.items(), key=lambda each: -each[1])},
        "false_reasons": [],
        "worst": None,
    }
    missing = numbers - whole.covered_parameters - sum(reasons.values())
    if missing:
        row["unaccounted"] = missing
    if expected is None:
        return row | {"verdict": "random"}
    row["false_reasons"] = [
        f"{layer.name}: {layer.reason}, and the gradient of {name} is not zero"
        for layer in whole.declared
        if layer.reason in UNREACHED
        for name in layer.parameters
        if (gradient := _gradient(expected, name, case)) is not None and bool(gradient.any())
    ]
    worst = _errors(case, whole, expected)
    wrong = {key: error for key, error in worst.errors.items() if error > TOLERANCE}
    if worst.errors:
        (layer, quantity), error = max(worst.errors.items(), key=lambda each: each[1])
        row["worst"] = {"error": error, "layer": layer, "quantity": quantity}
    row["wrong"] = [f"{quantity} of {layer}: {error:.2g}" for (layer, quantity), error in list(wrong.items())]
    row["wrong_layers"] = len({layer for layer, _ in wrong})
    verdict = "wrong" if wrong or missing else "false reason" if row["false_reasons"] else "right"
    return row | {"verdict": verdict, "compared": len(worst.errors)}


def _errors(case: Case, whole: FactorSet, expected: Truth) -> Worst:
    """Every quantity of every covered layer that the oracle knows."""
    worst = Worst()
    squares = {name: float(each.square().sum()) for name, each in expected.gradients.items()}
    floor = NEGLIGIBLE * sum(squares.values()) / expected.terms
    partial: dict[str, list[LayerFacts]] = defaultdict(list)
    for facts in whole.layers:
        gradients = [_gradient(expected, name, case) for name in facts.parameters]
        if any(each is None for each in gradients):
            for name in facts.parameters:
                partial[name.partition("[")[0]].append(facts)
            continue
        flat = torch.cat([each.reshape(len(each), -1) for each in gradients if each is not None], 1)
        if facts.exact_trace is not None:
            total = flat.square().sum() / expected.terms
            worst.add(facts.name, "trace", torch.tensor(facts.exact_trace, dtype=torch.float64), total, floor)
        if facts.form in ("block", "diagonal_block"):
            exact = flat.square().sum(0) if facts.form == "diagonal_block" else flat.T @ flat
            factors = whole.load(facts.ordinal)
            worst.add(facts.name, "block", factors.dense_G * factors.scale_G, exact / expected.terms, floor)
        elif case.alone:
            with contextlib.suppress(NotPlain):
                _compare_factors(case, whole, facts, expected, worst, floor)
    for base, parts in partial.items():
        # windows that no name describes: together they are the whole parameter
        alone = all(name.partition("[")[0] == base for facts in parts for name in facts.parameters)
        traces = [facts.exact_trace for facts in parts]
        if (
            alone
            and None not in traces
            and sum(facts.parameter_count for facts in parts) == expected.gradients[base][0].numel()
        ):
            worst.add(
                base,
                "trace",
                torch.tensor(sum(traces), dtype=torch.float64),
                torch.tensor(squares[base], dtype=torch.float64) / expected.terms,
                floor,
            )  # type: ignore[arg-type]
    return worst


class NotPlain(Exception):
    """Plain hooks do not see this layer's rows."""


def _compare_factors(
    case: Case, whole: FactorSet, facts: LayerFacts, expected: Truth, worst: Worst, floor: float
) -> None:
    match = _SLICE.match(facts.name)
    group = int(match[2]) if match and match[3] is None else 0
    name = facts.parameters[0].partition("[")[0]
    parameter = case.model.get_parameter(name)
    holders = [
        (path, module)
        for path, module in case.model.named_modules()
        if any(each is parameter for each in module.parameters(recurse=False))
    ]
    modules = [module for _, module in holders]
    rows = [expected.rows[path] for path, _ in holders if path in expected.rows and expected.rows[path].g]
    if not rows or len({type(each) for each in modules}) > 1 or len(rows) < len({id(each) for each in modules}):
        raise NotPlain
    if facts.form == "diagonal" and not isinstance(modules[0], nn.Embedding):
        raise NotPlain
    weight, bias = (any(_last(each) == key for each in facts.parameters) for key in ("weight", "bias"))
    groups = getattr(modules[0], "groups", 1)
    if match and groups == 1:
        raise NotPlain
    factors = whole.load(facts.ordinal)
    A = factors.A * factors.scale_A
    G = factors.dense_G * factors.scale_G
    worst.add(facts.name, "A", A.double(), activation_factor(rows, modules, group, weight=weight, bias=bias))
    worst.add(facts.name, "G", G.double(), gradient_factor(rows, group, expected.terms), floor)


def _last(label: str) -> str:
    return label.partition("[")[0].rpartition(".")[2]


def _gradient(expected: Truth, label: str, case: Case) -> Tensor | None:
    """(N, …) of a parameter or of a part of it by its label; None where the label does not say which part."""
    if label in expected.gradients:
        return expected.gradients[label]
    match = _SLICE.match(label)
    if match is None or match[1] not in expected.gradients:
        return None
    whole, start = expected.gradients[match[1]], int(match[2])
    module = case.model.get_submodule(match[1].rpartition(".")[0])
    if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1:  # noqa: SLF001 - the common ancestor
        each = whole.shape[1] // module.groups
        return whole[:, start * each : (start + 1) * each]
    return whole[:, start : int(match[3])] if match[3] else whole[:, start]
