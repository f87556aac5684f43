"""Extreme eigenvalues of a symmetric matrix F known by its products, multiplicities counted.

Lanczos with full reorthogonalisation from a random vector finds each *distinct* eigenvalue once. So the search goes
in rounds. A round ends when the ``count`` outermost Ritz values at each end have converged; their vectors X are
locked, and the next round starts from a random vector orthogonal to them, that is, on ``C = (I − XXᵀ) F (I − XXᵀ)``.
It finds the next copy of a multiple eigenvalue; where one copy a round is too slow, it starts from twice as many
vectors. The search is over once a round shows that nothing in C passes the last wanted value θ_k: the outermost Ritz
value ω of C has converged and does not pass θ_k, or it has stayed away from θ_k for long enough. After j steps from a
random vector the largest eigenvalue of C exceeds ω by ε of the spread with a probability of at most ``1.648 √n
exp(−√ε (2j − 1))``, of which 10⁻⁸ is asked for.

At last X is multiplied once more, which measures its residuals, rounding included; ``krylov.search_options`` says
what follows for each value. The rounding of one product is taken as four times the distance between the products of x
and of 0.7 x, which are rounded differently, and four units of the last place of the largest eigenvalue. What is not
``converged`` has a bound of its own residual and rounding: an eigenvalue lies within it, and others may be missing.

References:
    Parlett (1998), The symmetric eigenvalue problem, chapters 11 and 13
    Kuczyński & Woźniakowski (1992), Estimating the largest eigenvalue by the power and Lanczos algorithms, theorem 4.2
    Wu & Simon (2000), Thick-restart Lanczos method for large symmetric eigenvalue problems
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from engine.linalg.lanczos import WIDTH, Projection, Ritz, along
from engine.operators.krylov.iteration import Iteration
from engine.operators.krylov.search_options import (
    ENDS,
    Eigenvalue,
    Ends,
    SearchOptions,
    gaussian,
    joint_bounds,
    require,
)

__all__ = ["Eigenvalue", "Ends", "ExtremeEigenvalues", "SearchOptions"]

_RARE = 1e-8
_OTHER = 0.7
_SEARCH, _CONFIRM, _DONE = 0, 1, 2
_NUMBERS = ("locked", "steps", "frozen", "width", "draws", "stage", "checked", "products", "cursor", "verified")


class ExtremeEigenvalues(Iteration):
    """A search of the ends of a spectrum; ``vectors`` are 8 at most, a view of the basis.

    Args:
        size: n, the order of the matrix.
        options: What is searched for.
        device: Where the basis is kept.

    Raises:
        ValueError: If an option contradicts the size.

    Memory:
        ``search_bytes(size, options)``: as many vectors as ``length``, or as products are
        allowed, and three times eight in float64.
    """

    named = "search"

    def __init__(self, size: int, options: SearchOptions, device: torch.device | str = "cpu") -> None:
        super().__init__(size, options.dtype)
        require(size, options)
        self.options = options
        self._basis = Projection(options.room(size), size, options.dtype, device)
        self._found = torch.zeros(2, self._basis.room, dtype=torch.float64)
        self._number = dict.fromkeys(_NUMBERS, 0)
        self._slip = self._rounding = 0.0
        self._number["width"] = 1
        self._inject()

    @property
    @override
    def vectors(self) -> Tensor:
        number = self._number
        if number["stage"] == _SEARCH:
            return self._basis.vectors
        return self._basis.rows[number["cursor"] : number["cursor"] + self._confirmed_at_once()].mT

    @property
    @override
    def done(self) -> bool:
        return self._number["stage"] == _DONE

    @property
    @override
    def products(self) -> int:
        return self._number["products"]

    @property
    def _tolerance(self) -> float:
        """Residual at which a Ritz value counts as found."""
        eps = torch.finfo(self.options.dtype).eps
        relative = eps**0.5 if self.options.tolerance is None else self.options.tolerance
        # below that only rounding is left
        return max(relative, 32 * eps) * self._basis.scale

    @property
    def _reserve(self) -> int:
        """Products set aside for the last measurement."""
        needed = min(self.options.wanted, self.size) + 1
        return needed if self.options.most_products >= 3 * needed else 0

    @override
    def _advance(self, block: Tensor) -> None:
        self._number["products"] += block.shape[0]
        if self._number["stage"] == _CONFIRM:
            self._measure(block)
            return
        basis, number = self._basis, self._number
        fresh = basis.extend(block)
        number["steps"] += 0 if number["frozen"] else 1
        if basis.held + fresh.shape[0] > basis.room:
            self._restart()
        basis.append(fresh)
        if basis.pending == 0 or basis.held >= number["checked"] or self._is_spent():
            self._examine()
        if number["stage"] == _SEARCH and self._is_spent():
            self._lock(basis.ritz())
            self._confirm()

    def _is_spent(self) -> bool:
        """Whether the next products, and those of the last measurement, are more than allowed."""
        after = self._number["products"] + max(self._basis.pending, 1) + self._reserve
        return after > self.options.most_products

    def _restart(self) -> None:
        """Keep the best Ritz vectors of the round beside the locked ones."""
        locked, count = self._number["locked"], self._basis.held - self._number["locked"]
        kept = (min(self.options.wanted, self.size) + self._basis.room) // 2 - locked
        low = {"largest": 0, "smallest": kept}.get(self.options.end, kept // 2)
        self._basis.restart(locked, [*range(low), *range(count - (kept - low), count)])
        self._number.update(frozen=1, checked=self._basis.held)

    def _inject(self) -> None:
        """Go on from random vectors orthogonal to the basis."""
        basis, number = self._basis, self._number
        if basis.room < self.size and basis.held + number["width"] > basis.room:
            self._restart()
        count = min(number["width"], self.size - basis.held, basis.room - basis.held)
        draws = range(number["draws"], number["draws"] + count)
        basis.append_apart(gaussian(self.options.seed, draws, self.size, basis.rows.device))
        number["draws"] += count

    def _outermost(self, count: int) -> list[int]:
        """Places of the wanted ones among ``count`` ascending values."""
        wanted = min(self.options.count, count)
        low = range(wanted) if self.options.end != "largest" else range(0)
        high = range(count - wanted, count) if self.options.end != "smallest" else range(0)
        return sorted({*low, *high})

    def _examine(self) -> None:
        """Lock what has converged, start another round, or end the search."""
        number = self._number
        held = self._basis.held
        number["checked"] = held + max(1, held // 8)
        ritz = self._basis.ritz()
        outermost = self._outermost(held)
        converged = held >= self.options.count and bool((ritz.residuals[outermost] <= self._tolerance).all())
        whole = held == self.size
        if whole:
            self._lock(ritz)
            self._verified()
        elif converged and number["locked"] == 0:
            self._lock(ritz)
            self._inject()
        elif number["locked"] and held > number["locked"] and self._judge(ritz, converged=converged):
            return
        elif self._basis.pending == 0:
            # an invariant subspace that does not hold all that is wanted: a vector beside it goes on
            self._inject()

    def _judge(self, ritz: Ritz, *, converged: bool) -> bool:
        """Compare the round's own Ritz values with the locked ones; return whether the round ended."""
        locked = self._number["locked"]
        own = self._basis.ritz(locked)
        settled = self._basis.matrix[:locked, :locked].diagonal().sort().values
        wanted = min(self.options.count, locked)
        ends = {"largest": ("largest",), "smallest": ("smallest",)}.get(self.options.end, ("largest", "smallest"))
        beyond, slips, certain = 0, [0.0], True
        for end in ends:
            sign = 1.0 if end == "largest" else -1.0
            threshold = sign * float(settled[-wanted if end == "largest" else wanted - 1])
            outer = -1 if end == "largest" else 0
            mine = sign * own.values
            omega, residual = float(mine[outer]), float(own.residuals[outer])
            passing = mine[mine > threshold + self._tolerance]
            if passing.numel():
                near = (passing[:, None] - passing[None, :]).abs() <= 2 * self._tolerance
                beyond = max(beyond, int(near.sum(1).max()))
            elif omega < threshold and self._is_unlikely(threshold - omega, float(mine.max() - mine.min())):
                continue
            elif residual <= self._tolerance:
                slips.append(omega + residual - threshold)
            else:
                certain = False
        if beyond and converged:
            width = self._number["width"]
            self._number["width"] = min(2 * width, WIDTH, self._widest()) if beyond >= width else 1
            self._lock(ritz)
            self._inject()
            return True
        if not beyond and certain:
            self._slip = max(slips)
            self._verified()
            return True
        return False

    def _widest(self) -> int:
        """Vectors of a block for which the basis has room after a restart."""
        return max(1, (self._basis.room - min(self.options.wanted, self.size)) // 4)

    def _is_unlikely(self, gap: float, spread: float) -> bool:
        """Whether an eigenvalue of C beyond the gap would be found by now but in one case of 10⁸.

        The spread of C is taken as twice that of its Ritz values, which the same theorem justifies.
        """
        steps = 2 * self._number["steps"] - 1
        part = min(gap / (gap + 2 * spread), 0.25)
        return math.log(1.648) + 0.5 * math.log(self.size) - math.sqrt(part) * steps <= math.log(_RARE)

    def _lock(self, ritz: Ritz) -> None:
        """Keep the wanted Ritz vectors alone, the one of largest magnitude last, and forget what they leave outside."""
        chosen = sorted(self._outermost(self._basis.held), key=lambda place: abs(float(ritz.values[place])))
        self._basis.reduce(ritz, chosen)
        self._number.update(locked=len(chosen), steps=0, frozen=0, checked=0)

    def _verified(self) -> None:
        self._number["verified"] = 1
        self._confirm()

    def _confirm(self) -> None:
        """Let the locked vectors be multiplied once more, or, where no product is left for that, finish."""
        number = self._number
        locked = number["locked"]
        self._found[0, :locked] = self._basis.matrix[:locked, :locked].diagonal()
        self._found[1, :locked] = self._basis.dropped[:locked]
        number.update(cursor=0, stage=_CONFIRM)
        if number["products"] + locked + 1 > self.options.most_products:
            number.update(stage=_DONE, verified=0)
            return
        self._basis.rows[locked] = _OTHER * self._basis.rows[locked - 1]

    def _confirmed_at_once(self) -> int:
        """Columns of the last measurement that are multiplied next; its last two come together."""
        left = self._number["locked"] + 1 - self._number["cursor"]
        return WIDTH - 1 if left == WIDTH + 1 else min(left, WIDTH)

    def _measure(self, block: Tensor) -> None:
        """Take the residuals of the locked vectors from products of their own, and the rounding from the last two."""
        number, locked, first = self._number, self._number["locked"], self._number["cursor"]
        last = first + block.shape[0]
        if last > locked:
            # the stored vector 0.7 x is rounded too, which is part of the difference
            self._rounding = float((block[-1] / _OTHER - block[-2]).norm())
            block = block[:-1]
        for index, product in enumerate(block, start=first):
            vector = self._basis.rows[index].to(torch.float64)
            square = float(vector @ vector)
            value = float(vector @ product) / square
            self._found[0, index] = value
            self._found[1, index] = float((product - value * vector).norm()) / math.sqrt(square)
        number["cursor"] = last
        if last > locked:
            number["stage"] = _DONE

    def result(self) -> Ends:
        """Return what is found so far; before ``done`` nothing counts as converged.

        Returns:
            The ends asked for, each with bounds.
        """
        values, bounds, converged = self._summary()
        entries = [
            Eigenvalue(value=value, bound=bound, converged=converged)
            for value, bound in zip(values.tolist(), bounds.tolist(), strict=True)
        ]
        count = min(self.options.count, len(entries))
        return Ends(
            largest=() if self.options.end == "smallest" else tuple(entries[::-1][:count]),
            smallest=() if self.options.end == "largest" else tuple(entries[:count]),
        )

    def _summary(self) -> tuple[Tensor, Tensor, bool]:
        """Values (m,), ascending, bounds (m,), and whether they hold place by place."""
        number = self._number
        least = 4 * torch.finfo(self.options.dtype).eps * self._basis.scale
        if number["stage"] == _SEARCH:
            if self._basis.held == 0:
                return torch.empty(0), torch.empty(0), False
            ritz = self._basis.ritz()
            chosen = self._outermost(self._basis.held)
            return ritz.values[chosen], ritz.residuals[chosen] + 4 * least, False
        locked = number["locked"]
        order = self._found[0, :locked].argsort(stable=True)
        values, residuals = self._found[:, :locked][:, order]
        if number["stage"] == _CONFIRM or number["cursor"] == 0:
            return values, residuals + 4 * least, False
        rounding = 4 * self._rounding + least
        if not number["verified"]:
            return values, residuals + rounding, False
        vectors = self._basis.rows[:locked]
        gram = along(vectors, vectors).cpu()[order][:, order]
        return values, joint_bounds(values, residuals, rounding, gram, self._slip, self._inner()), True

    def _inner(self) -> tuple[int, ...]:
        """Places, by ascending value, of the locked values beside which eigenvalues of C may lie."""
        locked, count = self._number["locked"], self.options.count
        if locked == self.size:
            return ()
        if locked < self.options.wanted:
            return tuple(range(locked))
        return {"largest": (0,), "smallest": (locked - 1,)}.get(self.options.end, (count - 1, count))

    @property
    @override
    def _numbers(self) -> tuple[list[int], list[int]]:
        options, basis = self.options, self._basis
        tolerance = -1.0 if options.tolerance is None else options.tolerance
        bits = int(torch.tensor(tolerance, dtype=torch.float64).view(torch.int64))
        own = [self.size, options.count, ENDS.index(options.end), bits, options.seed % 2**63, options.dtype.itemsize,
               options.most_products, -1 if options.length is None else options.length]  # fmt: skip
        return own, [basis.held, basis.pending, *self._number.values()]

    @override
    def _tensors(self) -> dict[str, Tensor]:
        basis, number = self._basis, self._number
        used = basis.held + basis.pending + (2 if number["stage"] != _SEARCH else 0)
        return {
            "rows": basis.rows[:used],
            "matrix": basis.matrix,
            "leaving": basis.leaving,
            "dropped": basis.dropped,
            "found": self._found,
            "reals": torch.tensor([basis.scale, self._slip, self._rounding], dtype=torch.float64),
        }

    @override
    def _go_on(self, state: Mapping[str, Tensor], counts: list[int]) -> None:
        basis = self._basis
        basis.rows[: state["rows"].shape[0]].copy_(state["rows"])
        for name in ("matrix", "leaving", "dropped"):
            getattr(basis, name).copy_(state[name])
        self._found.copy_(state["found"])
        basis.held, basis.pending, *others = counts
        self._number = dict(zip(_NUMBERS, others, strict=True))
        basis.scale, self._slip, self._rounding = state["reals"].tolist()
