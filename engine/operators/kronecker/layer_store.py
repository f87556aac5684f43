"""The layer store: layers of a factor set as operators, read and decomposed when they are asked for."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from catalog.requests.collection import Stabilisation
from engine.factors.dense import Dense, as_operator
from engine.factors.factor_set import Corrected, FactorSet, LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.linalg.damping import Damping, damping
from engine.linalg.eigenbasis import Eigenbasis
from engine.linalg.linear_operator import Operator
from engine.memory.guard import Guard
from engine.operators.kronecker.factor_side import FactorSide
from engine.operators.kronecker.layer_operator import DampingKind, LayerOperator

Curvature = Literal["kfac", "ekfac"]
_OF_SOLVERS = 4
"""Roundings of the largest eigenvalue, for each row, that an eigensolver's error in float64 stays within."""
_POLAR_STEPS = 3
"""From the rounding of 16 bits, 4e-3, to that of 64."""
_LEAST_SHARES = {torch.float64: 1e-12}
"""In float64 a solve at a condition of 1e12 keeps about three digits; of float32 none are left at its rounding."""
_UNDAMPED = Damping(joint=None, A=None, G=None, relative_A=None, relative_G=None)


def least_share(dtype: torch.dtype) -> float:
    """Return the smallest eigenvalue, as a share of the largest, below which a negative power is reported."""
    return _LEAST_SHARES.get(dtype) or float(torch.finfo(dtype).eps)


@dataclass(frozen=True, kw_only=True)
class IllConditioned:
    """A layer that was raised to a negative power though ``smallest < least_share · largest``."""

    layer: str
    exponent: float
    """The power of the damped curvature M, negative."""
    smallest: float
    """The smallest eigenvalue of M, or a lower bound of it; below zero where the rounding of its factors exceeds the
    damping."""
    largest: float
    """The largest, or an upper bound of it."""
    residual: float
    """``‖M^(−α) x − v‖ / ‖v‖`` of the very product ``x = M^α v``, over the layer's numbers."""
    dtype: torch.dtype
    """Precision of the arithmetic."""

    def __str__(self) -> str:
        """Say what was seen, and what helps."""
        wider = "" if self.dtype == torch.float64 else ", or vectors in float64"
        return (
            f"layer `{self.layer}`: the smallest eigenvalue of its damped curvature, {self.smallest:.3g}, must be at "
            f"least {least_share(self.dtype):.2g} of its largest, {self.largest:.3g}; its power {self.exponent:g} has "
            f"a relative residual of {self.residual:.2g}: take a larger damping{wider}"
        )


@dataclass(frozen=True, kw_only=True)
class KnownLayer:
    """Results that a job has of a layer before it becomes an operator."""

    damping: Damping
    bases: Mapping[Literal["A", "G"], Callable[[], Eigenbasis]]
    """Reads the eigenvectors of the sides that the job has decomposed; the others are decomposed here."""


@dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """How factors become an operator."""

    of: Curvature = "kfac"
    """`kfac`: G ⊗ A; `ekfac`: its eigenvectors with EK-FAC's eigenvalues."""
    kind: DampingKind = "none"
    """`none`; `exact`: F + λ I; `factored`: (G + λ_G I) ⊗ (A + λ_A I)."""
    stabilisation: Stabilisation = field(default_factory=Stabilisation)
    """How λ, λ_A and λ_G follow from the factors."""
    uncovered: Literal["zero", "refuse"] = "zero"
    """Whether a vector may have numbers other than zero where no layer covers the parameter."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device on which products are computed."""
    guard: Guard | None = None
    """Knows what memory is free for eigendecompositions; None assumes that everything fits."""
    resident_bytes: int | None = None
    """Bytes of factors, eigenvectors and inverses that stay between two products; None keeps all of them."""
    report: Callable[[IllConditioned], None] | None = None
    """Receives each layer of a product that rounding may have spoilt; None looks for none."""
    known: Callable[[int], KnownLayer | None] = lambda _: None
    """Returns the known results of a layer by its ordinal, which are taken in place of what would be computed here."""


class LayerStore:
    """Layers as operators, kept while ``resident_bytes`` allows.

    Sweeps over all layers are what products are made of, and of those the layers that came first stay: to let go of
    the one used longest ago would let go of each before its next use. Layers that whole sweeps have passed over make
    room.

    Memory:
        ``resident_bytes``, and the layer that was asked for last.
    """

    def __init__(self, factors: FactorSet, options: OperatorOptions) -> None:
        """Begin without any layer."""
        self._factors = factors
        self._options = options
        self._layers: dict[int, LayerOperator] = {}
        """By ordinal, the one that has been there longest first."""
        self._used: dict[int, int] = {}
        """When each was last asked for, in requests."""
        self._requests = 0
        self._sides: dict[int, FactorSide] = {}
        """A by the ordinal of the layer that holds it, for as long as a layer that has it is kept."""

    def operator(self, facts: LayerFacts) -> LayerOperator:
        """Return one layer's operator."""
        self._requests += 1
        self._used[facts.ordinal] = self._requests
        found = self._layers.get(facts.ordinal)
        if found is None:
            self._make_room(facts)
            found = self._layers[facts.ordinal] = self._read(facts)
        return found

    def _make_room(self, coming: LayerFacts) -> None:
        """Let go of layers before another is read; what it shares with them stays until then."""
        limit = self._options.resident_bytes
        if limit is None:
            return
        while self._layers and held_bytes(self._layers.values()) > limit:
            idle = min(self._layers, key=self._used.__getitem__)
            passed_over = self._requests - self._used[idle] > len(self._factors.layers)
            self._layers.pop(idle if passed_over else next(reversed(self._layers)))
        held = {facts.leader for facts in self._factors.layers if facts.ordinal in self._layers}
        held.add(coming.leader)
        self._sides = {holder: side for holder, side in self._sides.items() if holder in held}

    def _read(self, facts: LayerFacts) -> LayerOperator:
        options = self._options
        factors = self._factors.load(facts.ordinal)
        side_g = self._side_g(facts, factors)
        side_a = self._sides.get(facts.leader) or self._side_a(facts, factors)
        corrected = None
        if options.of == "ekfac" and self._factors.load_corrected is not None:
            own = self._factors.load_corrected(facts.ordinal)
            corrected = own.eigenvalues
            side_g, side_a = _in_basis(side_g, side_a, own)
        self._sides[facts.leader] = side_a
        damped, known = _UNDAMPED, options.known(facts.ordinal)
        if options.kind != "none" and known is not None:
            damped = known.damping
        elif options.kind != "none":
            damped = damping(
                side_a.content.trace() / facts.in_dim,
                side_g.content.trace() / facts.out_dim,
                options.stabilisation,
                block=facts.form in ("block", "diagonal_block"),
            )
        return LayerOperator(
            name=facts.name, G=side_g, A=side_a, kind=options.kind, damping=damped, corrected=corrected
        )

    def _side_a(self, facts: LayerFacts, factors: Factors) -> FactorSide:
        widened = factors.widened_A
        found = self._side(as_operator(widened, rank_bound=facts.rank_bound_A), factors.A.dtype, facts, "A")
        if widened is not factors.A and any(each.shared_A_with == facts.leader for each in self._factors.layers):
            # a factor set reads an A once for as long as it is held
            found.stored = factors.A
        return found

    def _side_g(self, facts: LayerFacts, factors: Factors) -> FactorSide:
        side = factors.side_G
        content = factors.widened_G if isinstance(side, Dense) else side.to(self._options.device)
        return self._side(as_operator(content, rank_bound=facts.rank_bound_G), side.storage_dtype, facts, "G")

    def _side(self, content: Operator, stored: torch.dtype, facts: LayerFacts, side: Literal["A", "G"]) -> FactorSide:
        known = self._options.known(facts.ordinal)
        read = known.bases.get(side) if known is not None and content.has_basis and not content.is_diagonal else None
        own = partial(content.basis, facts.name, self._options.device, self._options.guard)
        basis = own if read is None else partial(_as_it_is, read)
        # as the eigenvalues of independent rounding errors of the numbers; a solver's own error comes on top
        size = content.size
        rounding = torch.finfo(stored).eps * math.sqrt(size) + _OF_SOLVERS * size * torch.finfo(torch.float64).eps
        return FactorSide(content, basis, rounding=rounding, device=self._options.device)


def _in_basis(side_g: FactorSide, side_a: FactorSide, corrected: Corrected) -> tuple[FactorSide, FactorSide]:
    """The sides with EK-FAC's eigenvectors; their eigenvalues are not used."""
    found = []
    for side, vectors in ((side_g, corrected.eigenvectors_G), (side_a, corrected.eigenvectors_A)):
        basis = Eigenbasis(torch.zeros(side.content.size, dtype=torch.float64), vectors)
        found.append(FactorSide(side.content, partial(_orthonormal, basis), rounding=side.rounding, device=side.device))
    return found[0], found[1]


def _orthonormal(basis: Eigenbasis, dtype: torch.dtype) -> Eigenbasis:
    """A stored basis for products in a precision.

    Vectors that were rounded when they were stored are orthonormal to that rounding alone, and what a product with
    them multiplies by, a solve would not undo. In float64 the nearest orthonormal ones take their place, by Newton's
    iteration for the polar factor, which squares the distance at each step.
    """
    vectors = basis.vectors
    if vectors is None or dtype != torch.float64 or vectors.dtype == torch.float64:
        return basis
    wide = vectors.to(torch.float64)
    for _ in range(_POLAR_STEPS):
        wide = torch.addmm(wide, wide, wide.mT @ wide, beta=1.5, alpha=-0.5)
    return replace(basis, vectors=wide)


def _as_it_is(read: Callable[[], Eigenbasis], _: torch.dtype) -> Eigenbasis:
    """A basis in the precision that it was kept in."""
    return read()


def held_bytes(operators: Iterable[LayerOperator]) -> int:
    """Return the bytes that layers' operators hold by now."""
    tensors: dict[int, int] = {}
    for operator in operators:
        for side in (operator.G, operator.A):
            tensors |= side.held()
        if operator.corrected is not None:
            tensors[id(operator.corrected)] = operator.corrected.nbytes
    return sum(tensors.values())
