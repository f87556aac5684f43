"""The Kronecker-factored curvature of a model as one linear operator on vectors of its parameters.

The operator is block-diagonal, a block for each covered layer; numbers of parameters that no layer covers are zero in
every product, and their names are in ``uncovered``. Layers are taken one after another: a layer's factors are read,
moved to the device, multiplied, and let go of, unless ``resident_bytes`` lets them stay for the next product.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Self, overload

import torch
from torch import Tensor

from engine.errors import BrokenFactors, NoSuchLayer, UsageError
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.merging.blend import blend_factor_sets
from engine.model.state.model_state import host_by_default
from engine.operators.kronecker.layer_operator import LayerOperator
from engine.operators.kronecker.layer_store import IllConditioned, LayerStore, OperatorOptions, least_share
from engine.operators.parameter_space import ParameterSpace, Vector


class KroneckerOperator:
    """The damped curvature of all covered layers, or of some, raised to a power.

    Memory:
        ``resident_bytes``, one layer's factors, and for powers its eigenvectors.
    """

    def __init__(self, factors: FactorSet, options: OperatorOptions, layers: Sequence[str] | None = None) -> None:
        """Check that the factors can be used so; nothing is read or decomposed yet.

        Args:
            factors: The factor set, in memory or stored.
            options: Which curvature, which damping, and where it is computed.
            layers: Names of the layers that take part; None is all of them.

        Raises:
            NoSuchLayer: If a name is none of the factors'.
            BrokenFactors: If EK-FAC is asked for and was not collected, or the numbers' places are not known.
            UsageError: If EK-FAC shall be damped by factors, or a layer keeps no more than a sketch of its G.
        """
        self.space = ParameterSpace.of(factors)
        self.options = options
        self._factors = factors
        self._layers = _chosen(factors, layers)
        self._exponent = 1.0
        if options.of == "ekfac" and factors.load_corrected is None:
            raise BrokenFactors("the factors were collected without EK-FAC; take `collection.ekfac: true`")
        if options.of == "ekfac" and options.kind == "factored":
            raise UsageError(
                "EK-FAC's eigenvalues belong to no product of two factors, so `factored` damping has no meaning for "
                "them; take `exact`"
            )
        for facts in self._layers:
            self.space.require_windows(facts)
            if facts.representation_G == "diagonal_sketch":
                raise UsageError(
                    f"layer `{facts.name}`: a sketch of its G is kept, which is near it and not it; leave the layer "
                    "out, or collect it with a larger budget",
                    layer=facts.name,
                )
        self._store = LayerStore(factors, options)

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P), P being all trainable numbers of the model."""
        return self.space.size, self.space.size

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that take part, in the model's order."""
        return tuple(facts.name for facts in self._layers)

    @property
    def exponent(self) -> float:
        """The power that the damped curvature is raised to."""
        return self._exponent

    @cached_property
    def uncovered(self) -> tuple[str, ...]:
        """Names of parameters of which some numbers belong to no layer that takes part."""
        counts = {each.name: math.prod(each.shape) for each in self.space.parameters}
        for facts in self._layers:
            for window in facts.windows or ():
                counts[window.parameter] -= window.height * window.width
        return tuple(name for name, left in counts.items() if left)

    def power(self, exponent: float) -> Self:
        """Return the operator raised to a further power.

        Args:
            exponent: α, finite. Where it is not positive, every layer must be damped or regular; 0 keeps the numbers
                of the covered parameters and sets the others to zero.

        Returns:
            An operator that shares what this one has read and decomposed.

        Raises:
            UsageError: If α is not finite.
        """
        if not _is_finite(exponent):
            raise UsageError(f"the power must be a finite number (got {exponent!r})")
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._exponent = self._exponent * exponent
        return other

    def sqrt(self) -> Self:
        """Return the symmetric positive root."""
        return self.power(0.5)

    def inverse(self) -> Self:
        """Return the inverse."""
        return self.power(-1.0)

    def restricted(self, layers: Sequence[str]) -> Self:
        """Return the operator of some of the layers.

        Args:
            layers: Their names.

        Returns:
            An operator on the same vectors, which shares what this one has read and decomposed.

        Raises:
            NoSuchLayer: If a name is none of this operator's.
        """
        _chosen(dataclasses.replace(self._factors, layers=self._layers), layers)
        other = self.power(1.0)
        other._layers = tuple(facts for facts in self._layers if facts.name in set(layers))  # noqa: SLF001 - a copy
        other.__dict__.pop("uncovered", None)
        return other

    def merged(self, other: "KroneckerOperator", decay: float) -> Self:
        """Return the operator of a moving average of the factors, as preconditioned training refreshes them.

        Args:
            other: The curvature of newer examples, on the same layers.
            decay: β, from 0 to 1: each factor becomes ``β A + (1 − β) A′``, in float64 and rounded once.

        Returns:
            An operator with this one's options, its factors in memory; neither of the two is changed.

        Raises:
            UsageError: If β is out of its range, the layers differ, an operator is a power, or EK-FAC's eigenvalues are
                asked for, which belong to a basis of their own.
            NotMergeable: If only a sketch of a G is kept.

        Memory:
            The factors of all layers that take part.
        """
        if not 0 <= decay <= 1:
            raise UsageError(f"`decay` must be from 0 to 1: the weight of what was known before (got {decay})")
        if self.layers != other.layers:
            apart = sorted(set(self.layers) ^ set(other.layers)) or list(other.layers)
            raise UsageError(
                f"both operators must be of the same layers in one order (`{apart[0]}` is not in both, or elsewhere); "
                "restrict them to what they share"
            )
        if self._exponent != 1 or other.exponent != 1:
            raise UsageError(
                f"a power of a mean is not the mean of powers: merge first (got the powers {self._exponent} and "
                f"{other.exponent})"
            )
        if self.options.of == "ekfac":
            raise UsageError("EK-FAC's eigenvalues belong to the basis of one set of factors; take `of: kfac`")
        blended = blend_factor_sets(self._factors, other._factors, decay, self.layers)  # noqa: SLF001 - of the same kind
        options = dataclasses.replace(self.options, known=_unknown)
        return type(self)(blended, options)

    @overload
    def matvec(self, vector: Tensor) -> Tensor: ...

    @overload
    def matvec(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def matvec(self, vector: Vector) -> Tensor | dict[str, Tensor]:
        """Return the product with one vector, or with several.

        Args:
            vector: Flat, shape (P,) or (P, k), in the order of ``named_parameters()``; or tensors of the parameters'
                shapes by name, of which those that are left out are zero. Any float dtype and device; the arithmetic
                is in its precision or that of the factors, whichever is wider, and at least float32.

        Returns:
            What was given: a tensor of the same shape, dtype and device, or tensors by name, of every parameter. NaN
            spreads over the layer that it is in; no gradient flows back.

        Raises:
            UsageError: If the vector has another length or shape, numbers in uncovered parameters where that is
                refused, or a layer is singular and the power not positive.
        """
        if not isinstance(vector, Tensor):
            return self.space.unflatten(self._apply(self.space.flatten(vector)))
        return self._apply(self.space.flatten(vector))

    @overload
    def __matmul__(self, vector: Tensor) -> Tensor: ...

    @overload
    def __matmul__(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def __matmul__(self, vector: Vector) -> Tensor | dict[str, Tensor]:
        """Return ``matvec(vector)``."""
        return self.matvec(vector)

    @property
    def adjoint(self) -> Self:
        """The operator itself: it is symmetric."""
        return self

    @overload
    def solve(self, vector: Tensor) -> Tensor: ...

    @overload
    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def solve(self, vector: Vector) -> Tensor | dict[str, Tensor]:
        """Return x with ``operator @ x = vector`` on the covered parameters.

        Args:
            vector: The right-hand side, as for ``matvec``.

        Returns:
            As ``matvec``.

        Raises:
            UsageError: As ``matvec``.
        """
        return self.inverse().matvec(vector)

    @torch.no_grad()
    @host_by_default()
    def residuals(self, solution: Tensor, right: Tensor) -> dict[str, float]:
        """Return how far ``operator @ solution`` is from ``right``, as of ``solution = operator.solve(right)``.

        Args:
            solution: x, shape (P,) or (P, k).
            right: b, of the same shape.

        Returns:
            ``‖M x − b‖ / ‖b‖`` over the numbers of each layer, by its name, computed in float64; 0 where both are zero.

        Raises:
            UsageError: As ``matvec``, or if the shapes differ.
        """
        if solution.shape != right.shape:
            raise UsageError(
                f"the solution must have the right-hand side's shape {tuple(right.shape)} (got {tuple(solution.shape)})"
            )
        pair = [self.space.flatten(each) for each in (solution, right)]
        flat = [each if each.ndim == 2 else each[:, None] for each in pair]
        found = {}
        for facts, own in self._operators():
            x, b = (self.space.gather(facts, each, torch.float64, self.options.device) for each in flat)
            found[facts.name] = _relative(own.apply(x, self._exponent), b)
        return found

    @host_by_default()
    def trace(self) -> float:
        """Return the sum of the eigenvalues over the covered parameters."""
        return math.fsum(own.trace(self._exponent) for _, own in self._operators())

    @host_by_default()
    def logdet(self) -> float:
        """Return the natural logarithm of the determinant over the covered parameters; −∞ where a layer is singular.

        Returns:
            ``α log det M``.

        Raises:
            UsageError: If the power is not positive and a layer is singular.
        """
        total = 0.0
        for _, own in self._operators():
            own.require_power(self._exponent)
            total += 0.0 if self._exponent == 0 else self._exponent * own.logdet()
        return total

    @host_by_default()
    def diagonal(self) -> Tensor:
        """Return the diagonal, shape (P,), float64 on the host; zero where no layer covers a number."""
        flat = torch.zeros(self.space.size, 1, dtype=torch.float64)
        for facts, own in self._operators():
            matrix = own.diagonal(self._exponent).to("cpu")
            self.space.scatter(facts, matrix[:, None, :], flat)
        return flat[:, 0]

    def layer(self, name: str) -> LayerOperator:
        """Return the operator of one layer, without the power.

        Args:
            name: The layer's name.

        Returns:
            Its damped curvature, on matrices (out_dim, k, in_dim).

        Raises:
            NoSuchLayer: If there is none of that name.
        """
        (facts,) = _chosen(dataclasses.replace(self._factors, layers=self._layers), [name])
        return self._store.operator(facts)

    def _operators(self) -> Iterator[tuple[LayerFacts, LayerOperator]]:
        for facts in self._layers:
            yield facts, self._store.operator(facts)

    @torch.no_grad()
    @host_by_default()
    def _apply(self, flat: Tensor) -> Tensor:
        columns = flat if flat.ndim == 2 else flat[:, None]
        if self.options.uncovered == "refuse":
            self._require_covered(columns)
        result = torch.zeros_like(columns)
        if not columns.numel():
            return result.view(flat.shape)
        for facts, own in self._operators():
            wide = torch.promote_types(flat.dtype, own.dtype)
            matrices = self.space.gather(facts, columns, wide, self.options.device)
            found = own.apply(matrices, self._exponent)
            if self._exponent < 0 and self.options.report is not None:
                self._report(own, matrices, found, self.options.report)
            self.space.scatter(facts, found, result)
        return result.view(flat.shape)

    def _report(
        self, own: LayerOperator, right: Tensor, found: Tensor, report: Callable[[IllConditioned], None]
    ) -> None:
        """Report a layer whose eigenvalues reach further than the arithmetic resolves."""
        smallest, largest = own.bounds()
        if smallest >= least_share(right.dtype) * largest:
            return
        # M itself needs no eigenvectors of that precision
        wide = torch.float64 if self._exponent == -1 else right.dtype
        back = own.apply(found.to(wide), -self._exponent)
        report(
            IllConditioned(
                layer=own.name,
                exponent=self._exponent,
                smallest=smallest,
                largest=largest,
                residual=_relative(back, right.to(wide)),
                dtype=right.dtype,
            )
        )

    def _require_covered(self, columns: Tensor) -> None:
        if not self.uncovered:
            return
        covered = torch.zeros(self.space.size, 1, dtype=torch.bool, device=columns.device)
        for facts in self._layers:
            ones = covered.new_ones(facts.out_dim, 1, facts.in_dim)
            self.space.scatter(facts, ones, covered)
        beyond = self.space.unflatten(((columns != 0) & ~covered).any(1))
        names = [name for name, some in beyond.items() if bool(some.any())]
        if names:
            raise UsageError(
                f"the vector has numbers other than zero in {', '.join(f'`{name}`' for name in names[:5])}"
                f"{' and others' if len(names) > 5 else ''}, which no layer of the operator covers; set them to zero, "
                "or take `uncovered: zero`"
            )


def _unknown(_: int) -> None:
    """Nothing is known of merged factors yet."""


def _relative(found: Tensor, expected: Tensor) -> float:
    """``‖found − expected‖ / ‖expected‖``; 0 where both are zero."""
    missed, norm = float((found - expected).norm()), float(expected.norm())
    return missed / norm if norm > 0 else missed


def _chosen(factors: FactorSet, layers: Sequence[str] | None) -> tuple[LayerFacts, ...]:
    if layers is None:
        return factors.layers
    if isinstance(layers, str):
        raise UsageError(f"`layers` must be a list of names (got the text {layers!r}); write [{layers!r}]")
    known = {facts.name for facts in factors.layers}
    missing = [name for name in layers if name not in known]
    if missing or not layers:
        said = f"`{missing[0]}` is none of them" if missing else "none is named"
        raise NoSuchLayer(f"the factors cover {', '.join(f'`{name}`' for name in sorted(known)[:10])}; {said}")
    return tuple(facts for facts in factors.layers if facts.name in set(layers))


def _is_finite(number: object) -> bool:
    return isinstance(number, (numbers.Real, Tensor)) and math.isfinite(number)
