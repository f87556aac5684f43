"""One measurement of the operators' benchmark in a process of its own: ``python -m … WHAT CASE``, a JSON object.

``seconds`` takes turns of both libraries in one process, by its CPU time; ``peak`` is of one library alone, by the
kernel's account, above what was resident with the model and nothing collected.
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.cases import operators as cases
from benchmarks.conformance.contender import forget_peak, resident
from engine.factors.factor_set import FactorSet
from engine.linalg.linear_operator import Structured

COLUMNS = 10
MOST_ROWS = 4096
"""Up to so many outputs the peer's eigenvectors are waited for: of 8192 rows they take 95 s in float32."""


def timed(subjects: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each subject in each round, in turns; each is called once before."""
    for subject in subjects.values():
        subject()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            begun = time.process_time()
            subject()
            seconds[name].append(time.process_time() - begun)
    return seconds


def ratio(seconds: Mapping[str, list[float]], left: str, right: str) -> float:
    """Return the median over rounds of one subject's seconds over another's."""
    return statistics.median(a / b for a, b in zip(seconds[left], seconds[right], strict=True))


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of what is expected, in float64: small squares end in float32."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


class Gemms:
    """The matrix products that a K-FAC product, or a solve, consists of, on matrices that are contiguous."""

    def __init__(self, factors: FactorSet, *, twice: bool) -> None:
        """Take the layers' shapes; a solve of `exact` damping turns into the eigenvectors and back."""
        self._twice = twice
        self._layers = []
        for facts in factors.layers:
            side = factors.load(facts.ordinal).G
            height = side.rows.shape[0] if isinstance(side, Structured) else facts.out_dim  # type: ignore[attr-defined] # its rows
            sides = torch.randn(height, facts.out_dim), torch.randn(facts.in_dim, facts.in_dim)
            self._layers.append((*sides, torch.randn(facts.out_dim, facts.in_dim)))

    def __call__(self) -> None:
        """Multiply."""
        for left, right, matrix in self._layers:
            thin = left.shape[0] != left.shape[1]
            turned = left @ (matrix @ right if self._twice else matrix)
            if thin or self._twice:
                turned = left.mT @ turned
            turned @ right


def seconds(name: str, *, peers: bool, rounds: int) -> dict[str, Any]:
    """Return seconds of K-FAC's and the GGN's products and solves, and how far the libraries differ."""
    case = cases.built(name)
    factors = cases.factors_of(case)
    torch.manual_seed(1)
    vector, columns = torch.randn(case.size), torch.randn(case.size, COLUMNS)
    plain, exact, factored = (cases.kronecker(factors, kind) for kind in ("none", "exact", "factored"))
    subjects: dict[str, Callable[[], object]] = {
        "gemms": Gemms(factors, twice=False), "gemms of exact": Gemms(factors, twice=True),
        "product": lambda: plain @ vector, "factored": lambda: factored.solve(vector),
        "exact": lambda: exact.solve(vector),
    }  # fmt: skip
    found: dict[str, Any] = {"layers": len(factors.layers), "P": case.size}
    if peers:
        peer = cases.peer_kronecker(case, factors)
        heuristic, whole = cases.peer_inverse(peer, exact=False), cases.peer_inverse(peer, exact=True)
        subjects |= {"peer's product": lambda: peer @ vector, "peer's factored": lambda: heuristic @ vector}
        if max(facts.out_dim for facts in factors.layers) <= MOST_ROWS:
            subjects["peer's exact"] = lambda: whole @ vector
        expected = plain @ vector
        found["difference_kfac"] = difference(peer @ vector, expected)
    found["kfac"] = timed(subjects, rounds)
    del subjects
    found["kfac_columns"] = timed({"one": lambda: plain @ vector, "all": lambda: plain @ columns}, max(2, rounds // 2))
    found |= _gauss_newton(case, name, factors, vector, peers=peers, rounds=rounds)
    return found


def _gauss_newton(
    case: cases.Case, name: str, factors: FactorSet, vector: Tensor, *, peers: bool, rounds: int
) -> dict[str, Any]:
    exact = cases.gauss_newton(case, factors)
    inputs, targets = next(iter(cases.Labelled(case)))
    made = cases.arguments(case)
    columns = torch.randn(case.size, COLUMNS)

    def gradient() -> None:
        case.train()
        torch.autograd.grad(made["loss_func"](made["model_func"](inputs), targets), case.parameters)

    def ours(right: Tensor) -> Tensor:
        with exact.prepared():
            return exact.product(right)

    subjects: dict[str, Callable[[], object]] = {"gradient": gradient, "ggn": partial(ours, vector)}
    found: dict[str, Any] = {}
    if peers:
        # by eager attention, since it refuses the other
        other = cases.built(name, "eager")
        peer = cases.peer_gauss_newton(other)
        expected = ours(vector)
        found["difference_ggn"] = difference(peer @ vector, expected)
        subjects["peer's ggn"] = lambda: peer @ vector
    found["ggn"] = timed(subjects, rounds)
    found["ggn_columns"] = timed({"one": partial(ours, vector), "all": partial(ours, columns)}, 1)
    found["wide_tensors"] = _wide_tensors(case, lambda: ours(vector))
    return found


class _Alive(TorchDispatchMode):
    """The most storages of at least ``least`` bytes that are alive at once."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least
        self._known: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() >= self._least:
                storage = leaf.untyped_storage()
                self._known[storage._cdata] = StorageWeakRef(storage)  # noqa: SLF001 - how torch itself tells them apart
        self._known = {key: each for key, each in self._known.items() if not each.expired()}
        self.most = max(self.most, len(self._known))
        return result


def _wide_tensors(case: cases.Case, product: Callable[[], object]) -> int | None:
    """Storages of B·T·V numbers that are alive at once in a product; None of a model without a vocabulary."""
    if case.problem.task != "causal_lm":
        return None
    numbers = cases.SEQUENCES * (cases.LENGTH - 1) * cases.VOCABULARY
    with _Alive(4 * numbers) as alive:
        product()
    return alive.most


def peak(name: str, subject: str, *, peers: bool) -> dict[str, Any]:
    """Return a subject's highest resident set above that with the model alone."""
    case = cases.built(name, "eager" if peers and subject == "ggn" else "sdpa")
    for parameter in case.problem.model.parameters():
        float(parameter.detach().sum())
    vector = torch.randn(case.size)
    _return_memory()
    loaded = resident("VmRSS")
    factors = cases.factors_of(case)
    operator = _subject(case, factors, subject, peers=peers)
    del factors
    _return_memory()
    forget_peak()
    operator(vector)
    first = resident("VmHWM") - loaded
    _return_memory()
    forget_peak()
    operator(vector)
    return {"first": first, "again": resident("VmHWM") - loaded}


def _subject(case: cases.Case, factors: FactorSet, subject: str, *, peers: bool) -> Callable[[Tensor], object]:
    if subject == "ggn":
        if peers:
            return cases.peer_gauss_newton(case).__matmul__  # type: ignore[no-any-return] # of a library without types
        exact = cases.gauss_newton(case, factors)

        def product(vector: Tensor) -> Tensor:
            with exact.prepared():
                return exact.product(vector)

        return product
    if peers:
        found = cases.peer_kronecker(case, factors)
        chosen = found if subject == "product" else cases.peer_inverse(found, exact=subject == "exact")
        return chosen.__matmul__  # type: ignore[no-any-return] # as above
    if subject == "product":
        return cases.kronecker(factors, "none").matvec
    return cases.kronecker(factors, "exact" if subject == "exact" else "factored").solve


def _return_memory() -> None:
    """Let the allocator return what nothing holds, which would count as the subject's."""
    ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("seconds", "peak"))
    parser.add_argument("case", choices=cases.CASES)
    parser.add_argument("--subject", choices=("product", "factored", "exact", "ggn"), default="product")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "seconds":
        found = seconds(given.case, peers=given.peers, rounds=given.rounds)
    else:
        found = peak(given.case, given.subject, peers=given.peers)
    print("figures " + json.dumps(found), flush=True)


def lines(text: str) -> Iterator[dict[str, Any]]:
    """Yield what ``main`` printed, among whatever libraries print."""
    for line in text.splitlines():
        if line.startswith("figures "):
            yield json.loads(line.removeprefix("figures "))


if __name__ == "__main__":
    main()
