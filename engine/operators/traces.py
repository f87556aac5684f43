"""Traces of a symmetric matrix F from few products, with 95 % intervals: Hutch++ and XTrace.

**Hutch++** spends a third of the products on the range Q of ``F S`` with random S, a third on ``tr(Qᵀ F Q)``, which
is exact, and a third on Hutchinson's estimator of what is left, ``tr((I − QQᵀ) F (I − QQᵀ))``, whose samples give
Student's interval. Where F has few large eigenvalues little is left, and nothing where its rank is at most that
third.

**XTrace** spends half of them on ``F Ω``, and half on ``F Q`` for its range Q; every column ω_i is in turn the sample
of what is left by the range of the others: ``t_i = tr(Q_iᵀ F Q_i) + c_i · v_iᵀ F v_i`` with ``v_i = (I − Q_iQ_iᵀ)
ω_i`` and ``c_i = (n − k + 1)/‖v_i‖²``. The estimate is their mean, its interval Student's with the leave-one-out
standard error. The samples are correlated: what ω_i has along ω_j enters both t_i and t_j. Where that is all of their
deviation, the variance of the mean is twice that of independent samples, as for a statistic of pairs, and twice is
taken.

References:
    Meyer, Musco, Musco & Woodruff (2021), Hutch++: Optimal stochastic trace estimation
    Epperly, Tropp & Webber (2024), XTrace: Making the most of every sample in stochastic trace estimation
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from engine.linalg.eigensolvers import exact_svd
from engine.linalg.student import student_quantile
from engine.operators.krylov.iteration import Iteration
from engine.operators.krylov.search_options import gaussian

_FIRST_DRAW = 2**33
"""Other draws than those of a search or a quadrature with the same seed."""


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How much is spent on a trace."""

    products: int
    """Products of one vector, at most; six or more."""
    seed: int
    dtype: torch.dtype
    """Precision of the vectors, float32 or float64; what is computed from them is float64."""


@dataclass(frozen=True, kw_only=True)
class TraceEstimate:
    """A trace with its 95 % interval."""

    value: float
    low: float
    high: float
    products: int
    """Spent on it."""


class _Estimator(Iteration):
    """Two stages of products, and their state.

    Args:
        size: n, the order of the matrix.
        options: Products, seed, precision.
        device: Where the vectors are kept.

    Raises:
        ValueError: If an option is out of its range.

    Memory:
        At its peak, beside the products of its caller: for each of products / 2 columns, at most P, three vectors and
        eight in float64.
    """

    named = "estimate"
    _share: int
    """Parts that the products are divided into."""
    _correlation: float = 1.0
    """Variance of the samples' mean over that of independent ones."""

    def __init__(self, size: int, options: TraceOptions, device: torch.device | str = "cpu") -> None:
        super().__init__(size, options.dtype)
        if options.products < 6:
            raise ValueError(f"products must be at least 6, which give two samples (got {options.products})")
        self.options = options
        self._columns = min(options.products // self._share, size)
        self._stage = 0
        self._kept: dict[str, Tensor] = {}
        self._vectors = self._random(0, torch.device(device)).to(options.dtype).contiguous()

    @property
    @override
    def vectors(self) -> Tensor:
        return self._vectors

    def _random(self, first: int, device: torch.device) -> Tensor:
        """Gaussian vectors, (n, columns), float64."""
        draws = range(_FIRST_DRAW + first, _FIRST_DRAW + first + self._columns)
        return gaussian(self.options.seed, draws, self.size, device).mT

    @property
    @override
    def done(self) -> bool:
        return self._stage == 2

    @property
    @override
    def products(self) -> int:
        return (0, self._columns, self._share * self._columns)[self._stage]

    @override
    def _advance(self, block: Tensor) -> None:
        if self._stage == 0:
            self._prepare(block.mT)
        else:
            self._finish(block.mT)
        self._stage += 1
        # as they are once saved and read back: sums round as numbers lie
        self._vectors = self._vectors.contiguous()
        self._kept = {name: numbers.contiguous() for name, numbers in self._kept.items()}

    @abstractmethod
    def _prepare(self, block: Tensor) -> None:
        """Make the second stage's vectors from the first products, (n, b), float64."""

    @abstractmethod
    def _finish(self, block: Tensor) -> None:
        """Keep what is exact, and the samples of the rest, from the second products."""

    def result(self) -> TraceEstimate:
        """Return the estimate."""
        if not self.done:
            raise ValueError("the estimate needs the products of `vectors` until it is done")
        exact, samples = float(self._kept["exact"]), self._kept["samples"].tolist()
        mean = math.fsum(samples) / len(samples)
        half = 0.0
        if len(samples) > 1:
            variance = math.fsum((sample - mean) ** 2 for sample in samples) / (len(samples) - 1)
            half = student_quantile(len(samples) - 1) * math.sqrt(self._correlation * variance / len(samples))
        value = exact + mean
        return TraceEstimate(value=value, low=value - half, high=value + half, products=self.products)

    @override
    def _tensors(self) -> dict[str, Tensor]:
        return {"vectors": self._vectors, **self._kept}

    @property
    @override
    def _numbers(self) -> tuple[list[int], list[int]]:
        options = self.options
        own = [self._share, self.size, options.products, options.seed % 2**63, options.dtype.itemsize]
        return own, [self._stage]

    @override
    def _go_on(self, state: Mapping[str, Tensor], counts: list[int]) -> None:
        device = self._vectors.device
        self._kept = {name: numbers.to(device) for name, numbers in state.items() if name != "numbers"}
        self._vectors, (self._stage,) = self._kept.pop("vectors"), counts


class HutchPlusPlus(_Estimator):
    """Hutch++: one third of the products each on a range, its trace, and samples of the rest."""

    _share = 3

    @override
    def _prepare(self, block: Tensor) -> None:
        # take the range, and what random vectors have beside it
        basis = torch.linalg.qr(block).Q
        rest = self._random(self._columns, block.device)
        for _ in range(2):
            rest = rest - basis @ (basis.mT @ rest)
        self._vectors = torch.cat([basis, rest], 1).to(self.options.dtype)

    def _finish(self, block: Tensor) -> None:
        wide = self._vectors.to(torch.float64)
        each = (wide * block).sum(0).cpu()
        self._kept = {"exact": each[: self._columns].sum(), "samples": self._normalised(wide, each)}

    def _normalised(self, wide: Tensor, each: Tensor) -> Tensor:
        """Samples of the trace beside the range; vectors of one length deviate less."""
        inner = self.size - self._columns
        if inner == 0:
            return torch.zeros(1, dtype=torch.float64)
        return each[self._columns :] * inner / wide[:, self._columns :].square().sum(0).cpu()


class XTrace(_Estimator):
    """XTrace: half of the products on random vectors, half on their range, each vector a sample beside the others."""

    _share = 2
    _correlation = 2.0

    @override
    def _prepare(self, block: Tensor) -> None:
        self._kept = {"random": self._vectors, "first": block.to(self.options.dtype)}
        self._vectors = torch.linalg.qr(block).Q.to(self.options.dtype)

    def _finish(self, block: Tensor) -> None:
        basis, random = self._vectors.to(torch.float64), self._kept["random"].to(torch.float64)
        first = self._kept["first"].to(torch.float64)
        # s_i is the direction of the range that the other columns do not reach: R⁻ᵀ e_i, normalised
        left, values, right = exact_svd(basis.mT @ first)
        least = torch.finfo(self.options.dtype).eps * len(values) * values[0] + torch.finfo(torch.float64).tiny
        alone = left @ (right / values.clamp_min(float(least))[:, None])
        alone = alone / alone.norm(dim=0)
        inner = basis.mT @ block
        exact = inner.trace() - (alone * (inner @ alone)).sum(0)
        within = basis.mT @ random
        within = within - alone * (alone * within).sum(0)
        outside = random - basis @ within
        product = first - block @ within
        squares = outside.square().sum(0)
        room = self.size - self._columns + 1
        samples = exact + torch.where(squares > 0, room * (outside * product).sum(0) / squares, 0.0)
        self._kept = {"exact": torch.zeros((), dtype=torch.float64), "samples": samples.cpu()}
