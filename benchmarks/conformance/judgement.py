"""Judgement: one library, one case, one word.

==============  ==========================================================================
``exact``       what the oracle says, up to the library's own scale (which is reported beside it)
``wrong``       something else, and not a word about it
``refused``     an error; its message is quoted
``not covered`` no factors of that layer, and no error
==============  ==========================================================================
"""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.conformance import cases
from benchmarks.conformance.cases import Batch, Case
from benchmarks.conformance.problem import Factors

EXACT = 1e-8


class Batches:
    """Batches in a list."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        """Begin anew."""
        return iter(self.batches)

    def __len__(self) -> int:
        """Batches."""
        return len(self.batches)


def judged(library: str, name: str) -> dict[str, Any]:
    """The row of one library and one case."""
    try:
        adapter = importlib.import_module(f"benchmarks.conformance.adapters.{library}")
        return _judged(adapter, name)
    except Exception as error:  # noqa: BLE001 - a library may refuse with anything, and that is a result
        first = str(error).strip().partition("\n")[0][:300]
        case = cases.built(name)
        row = {"verdict": "refused", "message": f"{type(error).__name__}: {first}"}
        if case.question == "names_layer":
            # the module whose output is broken, or the first layer that it reaches
            row["names_it"] = any(f"`{layer}`" in str(error) for layer in ("2", "3"))
        return row


def _judged(adapter: Any, name: str) -> dict[str, Any]:  # noqa: ANN401 - a module
    case = cases.built(name)
    found = _collected(adapter, case, [case.batch])
    if case.question == "coverage":
        return _coverage(case, found)
    if case.question == "names_layer":
        return {"verdict": "wrong", "message": "returned factors"}
    if case.question == "order":
        again = cases.built(name)
        inputs, targets = again.batch
        halves = [(inputs[3:], targets[3:]), (inputs[:3], targets[:3])]
        keys = torch.tensor([3, 4, 5, 0, 1, 2])
        smaller = replace(again, problem=replace(again.problem, examples=3, keys=keys))
        one, other = (_pieces(own, case.parameter) for own in (found, _collected(adapter, smaller, halves)))
        return _compared(_dense(one), _dense(other))
    pieces = _pieces(found, case.parameter)
    if not pieces:
        return {"verdict": "not covered"}
    return _compared(_dense(pieces), _dense(case.expected))


def _collected(adapter: Any, case: Case, batches: list[Batch]) -> Factors:  # noqa: ANN401 - a module
    torch.manual_seed(0)
    factors: Factors = adapter.collect(case.problem, Batches(batches))
    return factors


def _pieces(found: Factors, parameter: str) -> list[tuple[Tensor, Tensor]]:
    """Factors of the layer that owns ``parameter``, or of its groups and slices, in their order."""
    layer = parameter.rpartition(".")[0]
    return [
        factors
        for name, factors in found.items()
        if name in (layer, parameter) or name.startswith((f"{layer}[", f"{parameter}["))
    ]


def _dense(pieces: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.kron(G, torch.diag(A) if A.ndim == 1 else A) for A, G in pieces]


def _compared(found: list[Tensor], expected: list[Tensor]) -> dict[str, Any]:
    left, right = torch.block_diag(*found), torch.block_diag(*expected)
    if left.shape != right.shape:
        return {"verdict": "wrong", "message": f"{left.shape[0]} parameters instead of {right.shape[0]}"}
    # whoever splits a layer further says nothing about what lies between the parts
    both = torch.block_diag(*map(torch.ones_like, found)) * torch.block_diag(*map(torch.ones_like, expected))
    left, right = left * both, right * both
    scale = float((left * right).sum() / (left * left).sum().clamp_min(1e-300))
    error = float((left * scale - right).norm() / right.norm())
    return {
        "verdict": "exact" if error <= EXACT else "wrong",
        "error": error,
        "scale": float(left.trace() / right.trace()),
    }


def _coverage(case: Case, found: Factors) -> dict[str, Any]:
    trainable = sum(parameter.numel() for parameter in case.problem.model.parameters())
    covered = sum(A.shape[0] * G.shape[0] for A, G in found.values())
    declared = int(getattr(found, "declared_parameters", 0))
    verdict = "exact" if covered + declared == trainable else "not covered"
    return {"verdict": verdict, "covered": covered / trainable, "declared": declared / trainable}
