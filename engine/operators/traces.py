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
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from engine.linalg.eigensolvers import exact_svd
from engine.linalg.student import student_quantile
from engine.operators.krylov.search_options import gaussian, received

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


def trace_bytes(size: int, options: TraceOptions) -> int:
    """Return the bytes that either estimator holds at its peak, beside the products of its caller."""
    columns = min(options.products // 2, size)
    return 3 * columns * size * options.dtype.itemsize + 8 * columns * size * 8


class _Estimator(ABC):
    """Two stages of products, and their state."""

    _share: int
    """Parts that the products are divided into."""
    _correlation: float = 1.0
    """Variance of the samples' mean over that of independent ones."""

    def __init__(self, size: int, options: TraceOptions, device: torch.device | str = "cpu") -> None:
        if size < 1:
            raise ValueError(f"the matrix must have at least one row (got {size})")
        if options.products < 6:
            raise ValueError(f"products must be at least 6, which give two samples (got {options.products})")
        if options.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be float32 or float64 (got {options.dtype})")
        self.size, self.options = size, options
        self._columns = min(options.products // self._share, size)
        self._stage = 0
        self._kept: dict[str, Tensor] = {}
        self.vectors = self._random(0, torch.device(device)).to(options.dtype).contiguous()
        """Vectors to be multiplied next, shape (n, b)."""

    def _random(self, first: int, device: torch.device) -> Tensor:
        """Gaussian vectors, (n, columns), float64."""
        draws = range(_FIRST_DRAW + first, _FIRST_DRAW + first + self._columns)
        return gaussian(self.options.seed, draws, self.size, device).mT

    @property
    def done(self) -> bool:
        """Whether both stages are made."""
        return self._stage == 2

    @property
    def products(self) -> int:
        """Products handed in so far, one for each vector."""
        return (0, self._columns, self._share * self._columns)[self._stage]

    def advance(self, products: Tensor) -> None:
        """Take in the products of ``vectors``.

        Args:
            products: ``F vectors``, shape (n, b), any float dtype; left as it is.

        Raises:
            WrongShape: If the shape is not that of ``vectors``.
            NonFiniteFactor: If a number is NaN or infinite.
            ValueError: If nothing is left to be multiplied.
        """
        if self.done:
            raise ValueError("the estimate is done and takes no products; read `result()`")
        block = received(products, self.vectors).mT
        if self._stage == 0:
            self._prepare(block)
        else:
            self._finish(block)
        self._stage += 1
        # as they are once saved and read back: sums round as numbers lie
        self.vectors = self.vectors.contiguous()
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

    def state(self) -> dict[str, Tensor]:
        """Return all that is needed to go on; save it before the next ``advance``.

        Returns:
            Vectors and products, on their device, and numbers on the host.
        """
        numbers = torch.tensor([*self._identity, self._stage], dtype=torch.int64)
        return {"vectors": self.vectors, "numbers": numbers, **self._kept}

    @property
    def _identity(self) -> list[int]:
        options = self.options
        return [self._share, self.size, options.products, options.seed % 2**63, options.dtype.itemsize]

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a state, as if this object had made the products itself.

        Args:
            state: What ``state`` gave, of an estimate of the same kind, size and options.

        Raises:
            ValueError: If the state is another estimate's.
        """
        *identity, stage = state["numbers"].tolist()
        if identity != self._identity:
            raise ValueError(
                f"the state must be of this estimate, {self._identity} (got {identity}: share, size, products, seed, "
                "bytes of a number); begin anew, or restore the options that it was saved with"
            )
        device = self.vectors.device
        kept = {name: numbers.to(device) for name, numbers in state.items() if name != "numbers"}
        self.vectors = kept.pop("vectors")
        self._kept, self._stage = kept, stage


class HutchPlusPlus(_Estimator):
    """Hutch++: one third of the products each on a range, its trace, and samples of the rest.

    Args:
        size: n, the order of the matrix.
        options: Products, seed, precision.
        device: Where the vectors are kept.

    Raises:
        ValueError: If an option is out of its range.

    Memory:
        ``trace_bytes(size, options)``.
    """

    _share = 3

    @override
    def _prepare(self, block: Tensor) -> None:
        # take the range, and what random vectors have beside it
        basis = torch.linalg.qr(block).Q
        rest = self._random(self._columns, block.device)
        for _ in range(2):
            rest = rest - basis @ (basis.mT @ rest)
        self.vectors = torch.cat([basis, rest], 1).to(self.options.dtype)

    def _finish(self, block: Tensor) -> None:
        wide = self.vectors.to(torch.float64)
        each = (wide * block).sum(0).cpu()
        self._kept = {"exact": each[: self._columns].sum(), "samples": self._normalised(wide, each)}

    def _normalised(self, wide: Tensor, each: Tensor) -> Tensor:
        """Samples of the trace beside the range; vectors of one length deviate less."""
        inner = self.size - self._columns
        if inner == 0:
            return torch.zeros(1, dtype=torch.float64)
        return each[self._columns :] * inner / wide[:, self._columns :].square().sum(0).cpu()


class XTrace(_Estimator):
    """XTrace: half of the products on random vectors, half on their range, each vector a sample beside the others.

    Args:
        size: n, the order of the matrix.
        options: Products, seed, precision.
        device: Where the vectors are kept.

    Raises:
        ValueError: If an option is out of its range.

    Memory:
        ``trace_bytes(size, options)``.
    """

    _share = 2
    _correlation = 2.0

    @override
    def _prepare(self, block: Tensor) -> None:
        self._kept = {"random": self.vectors, "first": block.to(self.options.dtype)}
        self.vectors = torch.linalg.qr(block).Q.to(self.options.dtype)

    def _finish(self, block: Tensor) -> None:
        basis, random = self.vectors.to(torch.float64), self._kept["random"].to(torch.float64)
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
