"""The layer store: layers of a factor set as operators, read and decomposed when they are asked for."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from catalog.collection import Stabilisation
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.kronecker_factors import Corrected, Factors
from engine.linalg.damping import Damping, damping
from engine.linalg.eigendecomposition import decompose, decompose_structured, kept_dtype
from engine.linalg.linear_operator import Structured
from engine.memory.guard import Guard
from engine.operators.eigenbasis import SideBasis
from engine.operators.layer_operator import DampingKind, FactorSide, LayerOperator

Curvature = Literal["kfac", "ekfac"]
_UNDAMPED = Damping(joint=None, A=None, G=None, relative_A=None, relative_G=None)


@dataclass(frozen=True, kw_only=True)
class KnownLayer:
    """What a job has measured of a layer before it becomes an operator."""

    damping: Damping
    bases: Mapping[Literal["A", "G"], Callable[[], SideBasis]]
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
    """Where products are computed."""
    guard: Guard | None = None
    """Knows what memory is free for eigendecompositions; None assumes that everything fits."""
    resident_bytes: int | None = None
    """Bytes of factors and eigenvectors that stay between two products; None keeps all of them."""
    known: Callable[[int], KnownLayer | None] = lambda _: None
    """What is known of a layer by its ordinal, which is taken in place of what would be computed here."""


class LayerStore:
    """Layers as operators, kept while ``resident_bytes`` allows.

    Memory:
        ``resident_bytes``, and the layer that was asked for last.
    """

    def __init__(self, factors: FactorSet, options: OperatorOptions) -> None:
        """Begin without any layer.

        Args:
            factors: The factor set, in memory or stored.
            options: Which curvature and which damping.
        """
        self._factors = factors
        self._options = options
        self._layers: OrderedDict[int, LayerOperator] = OrderedDict()
        self._sides: dict[int, FactorSide] = {}
        """A by the ordinal of the layer that holds it, for as long as a layer that has it is kept."""

    def operator(self, facts: LayerFacts) -> LayerOperator:
        """Return one layer's operator.

        Args:
            facts: The layer.

        Returns:
            Its operator, which stays until others need the room.
        """
        known = self._layers.pop(facts.ordinal, None)
        found = self._read(facts) if known is None else known
        self._layers[facts.ordinal] = found
        self._drop()
        return found

    def _drop(self) -> None:
        """Let go of the layers used longest ago; the current one stays, and with it the A that it shares."""
        limit = self._options.resident_bytes
        if limit is None:
            return
        while len(self._layers) > 1 and sum(map(held_bytes, self._layers.values())) > limit:
            self._layers.popitem(last=False)
        held = {self._holder(facts) for facts in self._factors.layers if facts.ordinal in self._layers}
        self._sides = {holder: side for holder, side in self._sides.items() if holder in held}

    def _holder(self, facts: LayerFacts) -> int:
        return facts.ordinal if facts.shared_A_with is None else facts.shared_A_with

    def _read(self, facts: LayerFacts) -> LayerOperator:
        options = self._options
        factors = self._factors.load(facts.ordinal)
        side_g = self._side_g(facts, factors)
        side_a = self._sides.get(self._holder(facts)) or self._side_a(facts, factors)
        corrected = None
        if options.of == "ekfac" and self._factors.load_corrected is not None:
            own = self._factors.load_corrected(facts.ordinal)
            corrected = own.eigenvalues
            side_g, side_a = _in_basis(side_g, side_a, own, options.device)
        self._sides[self._holder(facts)] = side_a
        damped, known = _UNDAMPED, options.known(facts.ordinal)
        if options.kind != "none" and known is not None:
            damped = known.damping
        elif options.kind != "none":
            damped = damping(
                side_a.trace() / facts.in_dim,
                side_g.trace() / facts.out_dim,
                options.stabilisation,
                block=facts.form in ("block", "diagonal_block"),
            )
        return LayerOperator(
            name=facts.name, G=side_g, A=side_a, kind=options.kind, damping=damped, corrected=corrected
        )

    def _side_a(self, facts: LayerFacts, factors: Factors) -> FactorSide:
        content = factors.widened_A.to(self._options.device)
        own = partial(self._basis, content, facts.name, facts.rank_bound_A)
        return FactorSide(content, self._known_basis(facts, "A", content) or own)

    def _side_g(self, facts: LayerFacts, factors: Factors) -> FactorSide:
        if isinstance(factors.G, Structured):
            structured = factors.G.to(self._options.device)
            own = partial(self._structured_basis, structured, facts.name)
            return FactorSide(structured, self._known_basis(facts, "G", structured) or own)
        content = factors.widened_G.to(self._options.device)
        own = partial(self._basis, content, facts.name, facts.rank_bound_G)
        return FactorSide(content, self._known_basis(facts, "G", content) or own)

    def _known_basis(
        self, facts: LayerFacts, side: Literal["A", "G"], content: Tensor | Structured
    ) -> Callable[[], SideBasis] | None:
        known = self._options.known(facts.ordinal)
        decomposed = content.has_basis if isinstance(content, Structured) else content.ndim == 2
        return known.bases.get(side) if known is not None and decomposed else None

    def _basis(self, content: Tensor, layer: str, rank_bound: int | None) -> SideBasis:
        if content.ndim == 1:
            return SideBasis(content.to("cpu", torch.float64).clamp_min(0), None, content.shape[0])
        found = decompose(content, layer, need="vectors", rank_bound=rank_bound, guard=self._options.guard)
        assert found.vectors is not None  # noqa: S101 - they were asked for
        vectors = found.vectors.to(self._options.device, kept_dtype(content.dtype))
        return SideBasis(found.values, vectors, content.shape[0])

    def _structured_basis(self, content: Structured, layer: str) -> SideBasis:
        found = decompose_structured(content, layer, need="vectors", guard=self._options.guard)
        if found is None or found.vectors is None:
            # says why there is none
            values, vectors = content.eigenbasis(layer)
        else:
            vectors = found.vectors
            values = found.values[found.values.numel() - vectors.shape[1] :]
        kept = vectors.to(self._options.device, kept_dtype(content.storage_dtype))
        return SideBasis(values.to("cpu", torch.float64), kept, content.size)


def _in_basis(
    side_g: FactorSide, side_a: FactorSide, corrected: Corrected, device: torch.device
) -> tuple[FactorSide, FactorSide]:
    """The sides with EK-FAC's eigenvectors; their eigenvalues are not used."""
    found = []
    for side, vectors in ((side_g, corrected.eigenvectors_G), (side_a, corrected.eigenvectors_A)):
        own = None if vectors is None else vectors.to(device)
        basis = SideBasis(torch.zeros(side.size, dtype=torch.float64), own, side.size)
        found.append(FactorSide(side.content, _constant(basis)))
    return found[0], found[1]


def _constant(basis: SideBasis) -> Callable[[], SideBasis]:
    return lambda: basis


def held_bytes(operator: LayerOperator) -> int:
    """Return the bytes that a layer's operator holds by now.

    Args:
        operator: The layer.

    Returns:
        Bytes of its factors, and of the eigenvectors that were made.
    """
    return sum(_tensor_bytes(tensor) for tensor in _tensors_of(operator))


def _tensors_of(operator: LayerOperator) -> Iterable[Tensor | Structured | None]:
    for side in (operator.G, operator.A):
        yield side.content
        made: Mapping[str, object] = side.__dict__
        basis = made.get("basis")
        yield basis.vectors if isinstance(basis, SideBasis) else None
    yield operator.corrected


def _tensor_bytes(content: Tensor | Structured | None) -> int:
    if content is None:
        return 0
    return content.size_bytes if isinstance(content, Structured) else content.numel() * content.element_size()
