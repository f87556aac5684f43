"""The local operator, curvature in this process: products, solves and powers on vectors of a model's parameters."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch

from catalog.brief import count_layers
from catalog.requests.collection import Stabilisation
from engine.factors.factor_set import FactorSet
from engine.operators.kronecker.layer_store import IllConditioned, OperatorOptions
from engine.operators.kronecker_operator import KroneckerOperator
from kronoscope.local_inputs import OptionRefused, options_record, usable_device
from kronoscope.local_inputs import choices as read_choices
from kronoscope.local_views import find_optional

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class IllConditionedWarning(UserWarning):
    """A layer was raised to a negative power though its eigenvalues reach further than the arithmetic resolves."""


class Operator(KroneckerOperator):
    """The curvature of a model's covered layers, on vectors of all its trainable parameters.

    A vector is flat, shape (P,) or (P, k), in the order of ``named_parameters()``, each parameter row by row and a tied
    one once; or a mapping of tensors by name. ``operator @ v``, ``operator.solve(v)``, ``operator.power(-0.5) @ v``.

    Where a solve, or another negative power, may have lost its digits, an ``IllConditionedWarning`` names the layer,
    its eigenvalues and the residual of that very product; ``residuals(x, v)`` gives those of all layers.
    """

    def __repr__(self) -> str:
        """Return one line: which curvature, its power and damping, its layers and its shape."""
        rows, columns = self.shape
        power = "" if self.exponent == 1 else f" to the power {self.exponent:g}"
        damped = "undamped" if self.options.kind == "none" else f"{self.options.kind} damping"
        return f"<Operator: {self.options.of}{power}, {damped}, {count_layers(self.layers)}, {rows:,} × {columns:,}>"

    def scipy(self) -> "LinearOperator":
        """Return the operator as SciPy's, for its solvers.

        Returns:
            A ``scipy.sparse.linalg.LinearOperator`` of shape (P, P) on float64 arrays.

        Raises:
            ModuleNotFoundError: If SciPy is not installed.
        """
        message = "SciPy is not installed; `pip install scipy` brings its linear operators"
        linear_operator = find_optional("scipy.sparse.linalg:LinearOperator", message)

        def product(vector: Any) -> Any:  # noqa: ANN401 - SciPy's arrays
            return self.matvec(torch.as_tensor(vector, dtype=torch.float64)).numpy()

        found: LinearOperator = linear_operator(
            shape=self.shape,
            dtype="float64",
            matvec=lambda vector: product(vector.reshape(-1)),
            matmat=product,
            rmatvec=lambda vector: product(vector.reshape(-1)),
            rmatmat=product,
        )
        return found


class OperatorChoices(TypedDict, total=False):
    """The choices for an operator; each has a default."""

    of: Literal["kfac", "ekfac"]
    """`kfac` (the default), or `ekfac`: its eigenvectors with EK-FAC's eigenvalues."""
    damping: Literal["none", "exact", "factored"]
    """`none` (the default), `exact` (F + λ I) or `factored` ((G + λ_G I) ⊗ (A + λ_A I))."""
    stabilisation: Stabilisation | Mapping[str, Any] | None
    """Source of λ, λ_A and λ_G. Where it is left out, that of the measurement; of factors that were read, which are
    stored without one, the defaults of a job."""
    layers: Sequence[str] | None
    """Names of the layers that take part; all of them where it is left out."""
    uncovered: Literal["zero", "refuse"]
    """Whether numbers in uncovered parameters are passed over (the default) or refused."""
    device: str | torch.device
    """Device that computes the products; the CPU where it is left out."""
    resident_bytes: int | None
    """Bytes of factors and eigenvectors that stay between products; all of them where it is left out."""


def open_operator(factors: FactorSet, **choices: Unpack[OperatorChoices]) -> Operator:
    """Return the operator of a factor set, by ``OperatorChoices``.

    ``OptionRefused`` if a choice is none of its words or unknown, or the device is not there; other ``EngineError`` as
    ``engine.errors`` lists.
    """
    layers = choices.get("layers")
    if isinstance(layers, str):
        raise OptionRefused(
            f"`layers` must be a list, each a string, or None (got {layers!r}); write a list of names: [{layers!r}]"
        )
    damping: Any = choices.get("damping")
    if isinstance(damping, (int, float)) and not isinstance(damping, bool):
        raise OptionRefused(
            f"`damping` is {damping!r}, and names where λ enters; write `damping='exact'`, or 'factored', and "
            f"`stabilisation={{'damping': {damping!r}, 'damping_mode': 'absolute'}}` (or 'relative')"
        )
    given = read_choices(OperatorChoices, choices)
    resident = given.get("resident_bytes")
    if resident is not None and resident < 0:
        raise OptionRefused(f"`resident_bytes` must be 0 or more, or None (got {resident})")
    return Operator(
        factors,
        OperatorOptions(
            of=given.get("of", "kfac"),
            kind=given.get("damping", "none"),
            stabilisation=options_record(Stabilisation, given.get("stabilisation"), "stabilisation"),
            uncovered=given.get("uncovered", "zero"),
            device=usable_device(given.get("device", "cpu")),
            resident_bytes=resident,
            report=_warn,
        ),
        layers=given.get("layers"),
    )


def _warn(found: IllConditioned) -> None:
    # at the line that asked for the product, six calls further up
    warnings.warn(str(found), IllConditionedWarning, stacklevel=8)
