"""The judgement of one measurement of a model: every way in which it may be wrong, each a sentence."""

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.collect import collect_or_read
from engine.errors import NothingToAnalyse
from engine.factors.factor_set import FactorSet, LayerFacts
from tests.engine.gradient_identity.cases.oracle import Truth, distance, find_truth
from tests.engine.gradient_identity.cases.pair import Model
from tests.oracles import workspace

TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
_REASONS = ("examples_mix", "gradient_identity", "batch_not_first", "unforeseen_use", "no_gradient", "never_routed")
"""What a refusal of the whole model may name."""
_MIXED = frozenset({"examples_mix", "gradient_identity", "unforeseen_use"})
"""Reasons that say that a layer's rows are not those of each example alone."""


@dataclass(kw_only=True)
class Verdict:
    """What is wrong with a measurement; nothing where all four lists are empty."""

    wrong: list[str] = field(default_factory=list)
    """Covered, with other numbers."""
    unsaid: list[str] = field(default_factory=list)
    """Examples mix, and no reason says so; or a parameter has neither numbers nor a reason."""
    false: list[str] = field(default_factory=list)
    """A reason that does not hold, a refusal of what is right among them."""
    changed: list[str] = field(default_factory=list)
    """What of the model is another after the measurement."""

    def __str__(self) -> str:
        kinds = {"wrong": self.wrong, "unsaid": self.unsaid, "false": self.false, "changed": self.changed}
        return "; ".join(f"{kind}: {', '.join(lines)}" for kind, lines in kinds.items() if lines)


def judge(model: Model, size: int, dtype: str) -> Verdict:
    """Measure a model with batches of ``size``, and compare with the truth at that size."""
    x, y = model.data()
    truth = find_truth(model, x, y, size)
    net, verdict = model(), Verdict()
    before = Portrait(net)
    job = workspace(net, [(x, y)], "classification", fisher="empirical", batch_size=size, dtype=dtype)
    whole: FactorSet | None = None
    try:
        whole = collect_or_read(job)
        reasons = {name: {row.reason} for row in whole.declared for name in row.parameters}
    except NothingToAnalyse as error:
        said = {reason for reason in _REASONS if reason in str(error)}
        reasons = {name: said for name, _ in net.named_parameters()}
    verdict.changed = before.changes(net)
    limit = TOLERANCES[dtype]
    covered = set()
    if whole is not None:
        covered = {name.partition("[")[0] for layer in whole.layers for name in layer.parameters}
        for layer in whole.layers:
            for part, error in errors(whole, layer, truth).items():
                if not error <= limit:
                    verdict.wrong.append(f"{part} of {layer.name} is {error:.1e} off")
    for name, _ in net.named_parameters():
        if name not in covered:
            _judge_reasons(verdict, name, reasons.get(name, set()), truth)
    mixes = truth.outputs_off > limit or max(truth.off.values()) > limit
    if mixes and not any(found & _MIXED for found in reasons.values()):
        verdict.unsaid.append(f"examples mix, outputs by {truth.outputs_off:.1e}")
    return verdict


def _judge_reasons(verdict: Verdict, name: str, reasons: set[str], truth: Truth) -> None:
    """One of ``reasons`` must hold of a parameter that is not covered."""
    if not reasons:
        verdict.unsaid.append(f"nothing is said of {name}")
    # outputs that depend on other examples are a reason for every layer: the directions of the loss follow them
    mixed, idle = max(truth.off[name], truth.outputs_off) > 1e-12, not truth.has_gradient(name)
    if not (
        (reasons & _MIXED and mixed) or ("no_gradient" in reasons and idle) or (reasons == {"never_routed"} and idle)
    ):
        verdict.false.append(f"{name} is {' or '.join(sorted(reasons))}")


def errors(whole: FactorSet, layer: LayerFacts, truth: Truth) -> dict[str, float]:
    """How far each number of a covered layer is from the truth."""
    factors, sums, found = whole.load(layer.ordinal), truth.alone, {}
    if layer.exact_trace is not None:
        trace = sum(float(truth.second_moment(name).trace()) for name in layer.parameters)
        found["trace"] = abs(layer.exact_trace * truth.examples - trace) / max(trace, 1e-30)
    if layer.form == "kronecker" and layer.name in sums.A:
        found["A"] = distance(factors.widened_A, sums.A[layer.name] / sums.rows[layer.name])
        found["G"] = distance(factors.widened_G, sums.G[layer.name] / truth.examples)
    if layer.form == "diagonal_block":
        diagonal = torch.cat([truth.second_moment(name).diagonal() for name in layer.parameters])
        found["G"] = distance(factors.widened_G, diagonal / truth.examples)
    return found


class Portrait:
    """Everything of a model that a measurement must leave as it was."""

    def __init__(self, net: nn.Module) -> None:
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        self.tensors = {name: (each, each.detach().clone()) for name, each in _tensors(net).items()}
        self.gradients = {name: each.grad for name, each in net.named_parameters()}
        self.flags = {name: each.requires_grad for name, each in net.named_parameters()}
        self.modes = {name: each.training for name, each in net.named_modules()}
        self.hooks = _hooks(net)
        self.places = {name: dict(vars(each)) for name, each in net.named_modules()}
        self.contents = {name: copy.deepcopy(_containers(each)) for name, each in net.named_modules()}
        self.generators = _generators()

    def changes(self, net: nn.Module) -> list[str]:
        """What is no longer as it was, each a phrase."""
        return [*self._moved(net), *self._rewritten(net)]

    def _moved(self, net: nn.Module) -> Iterator[str]:
        """Tensors, gradients, flags and the generator."""
        now = _tensors(net)
        for name, (tensor, content) in self.tensors.items():
            if now.get(name) is not tensor:
                yield f"{name} is another tensor"
            elif tensor.dtype != content.dtype or not torch.equal(tensor, content):
                yield f"{name} has other numbers"
        for name, each in net.named_parameters():
            kept = self.gradients.get(name)
            if each.grad is not kept or kept is None or not bool((kept == 0.5).all()):
                yield f"{name} has another gradient"
            if each.requires_grad != self.flags.get(name):
                yield f"{name} has another requires_grad"
        for name, state in _generators().items():
            if state != self.generators[name]:
                yield f"{name}'s generator has moved"

    def _rewritten(self, net: nn.Module) -> Iterator[str]:
        """Modes, hooks, and attributes with all that stands in them."""
        if _hooks(net) != self.hooks:
            yield "hooks are left"
        for name, each in net.named_modules():
            said = name or "the model"
            if each.training != self.modes.get(name):
                yield f"{said} is in another mode"
            odd = set(vars(each)) ^ set(self.places.get(name, ()))
            if odd:
                yield f"attributes {', '.join(sorted(odd))} of {said}"
            before, after = self.contents.get(name, {}), _containers(each)
            for key in before:
                if key in after and not _same(before[key], after[key]):
                    yield f"{key} of {said} has other contents"


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def _generators() -> dict[str, str]:
    """The states of the default generators."""
    return {
        "torch": str(torch.get_rng_state().tolist()),
        "Python": str(random.getstate()),
        "numpy": str(np.random.get_state(legacy=False)["state"]),  # noqa: NPY002 - the one that is looked at
    }


def _hooks(net: nn.Module) -> dict[str, int]:
    return {
        f"{name}.{key}": len(value)
        for name, each in net.named_modules()
        for key, value in vars(each).items()
        if "hooks" in key and isinstance(value, Mapping)
    }


def _containers(module: nn.Module) -> dict[str, Any]:
    """What stands in a module beside its parameters, buffers, modules and hooks."""
    return {
        key: value for key, value in vars(module).items()
        if not key.startswith("_") and not callable(value) and key != "training"
    }  # fmt: skip


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.shape == right.shape and bool(torch.equal(left, right))
    if isinstance(left, torch.Generator):
        return bool(torch.equal(left.get_state(), right.get_state()))
    if isinstance(left, Mapping):
        return set(left) == set(right) and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (str, int, float)) or left is None:
        return bool(left == right)
    if hasattr(left, "__len__"):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    return all(_same(a, b) for a, b in zip(vars(left).values(), vars(right).values(), strict=True))
