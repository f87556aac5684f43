"""Kronecker factors: A and G of one layer.

``A`` (in_dim, in_dim) and ``G`` (out_dim, out_dim) are symmetric; where A is diagonal it is held
as its diagonal (in_dim,), and so is the G of a bare parameter. In place of a G that is not kept
dense there is a structured side (``engine.factors.representation``). Row-vector convention: the
layer's block of the curvature of the mean loss is ``G ⊗ A`` for ``weight.flatten()`` with the bias
as the last column.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.errors import BiasColumnMismatch
from engine.factors.dense import HOST, Dense, Hashed, as_operator, digest, mirrored_, packed, to_storage, unpacked
from engine.layers.layer import Form
from engine.linalg.linear_operator import Structured

__all__ = ["HOST", "Factors", "Hashed", "TiedParts", "digest", "mirrored_", "packed", "to_storage", "unpacked"]


@dataclass(frozen=True, kw_only=True)
class TiedParts:
    """The parts of the product of a head and its table, besides the head's own G."""

    A: Tensor
    """(in_dim, in_dim) the head's own A, on the host."""
    counts: Tensor
    """(V,) relative counts of the table's ids."""
    moments: Tensor
    """(d, d) second moments of the gradients of its vectors."""

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors under the names they are stored by, matrices as packed triangles."""
        return {
            "head_activation": packed(self.A),
            "table_counts": self.counts,
            "table_moments": packed(self.moments),
        }

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], *, in_dim: int, bias: bool) -> "TiedParts | None":
        """Restore the parts.

        Args:
            tensors: As ``stored`` returned them, and others.
            in_dim: Rows of A.
            bias: Whether A has a column for the head's bias, which the table lacks.

        Returns:
            The parts; None where they were not kept.

        Raises:
            BrokenFactors: If a triangle is of another size.
        """
        names = ("head_activation", "table_counts", "table_moments")
        if any(name not in tensors for name in names):
            return None
        head, counts, moments = (tensors[name] for name in names)
        return cls(A=unpacked(head, in_dim), counts=counts, moments=unpacked(moments, in_dim - int(bias)))


@dataclass(frozen=True, kw_only=True)
class Factors:
    """One layer's curvature."""

    layer: str
    form: Form
    bias: bool
    """A's last row and column belong to the bias."""
    A: Tensor
    """(in_dim, in_dim), or its diagonal (in_dim,), as it is stored."""
    G: Tensor | Structured
    """(out_dim, out_dim), or its diagonal (out_dim,), as it is stored; or what stands for it."""
    scale_A: float = 1.0
    """Power of two that the stored A is to be multiplied by."""
    scale_G: float = 1.0
    """The same of G."""
    head_diagonal: Tensor | None = None
    """(out_dim,) the diagonal of the head's own G, where G is that of the nearest product of a head and its table."""
    tied: TiedParts | None = None
    """The other parts of that product."""

    @property
    def side_A(self) -> Dense | Structured:  # noqa: N802 - the field's own symbol
        """A as an operator, with its scale."""
        return as_operator(self.A, self.scale_A)

    @property
    def side_G(self) -> Dense | Structured:  # noqa: N802 - the field's own symbol
        """G as an operator, with its scale."""
        return as_operator(self.G, self.scale_G)

    @property
    def out_dim(self) -> int:
        """Rows and columns of G."""
        return self.side_G.size

    @property
    def dense_G(self) -> Tensor:  # noqa: N802 - the field's own symbol
        """G where it is held as a matrix or a diagonal.

        Raises:
            TypeError: If something else stands for it.
        """
        if not isinstance(self.G, Tensor):
            message = f"layer `{self.layer}`: G is kept as `{self.G.kind}`, not as a matrix"
            raise TypeError(message)
        return self.G

    @property
    def widened_A(self) -> Tensor:  # noqa: N802 - the field's own symbol
        """A times its scale, in float32 or wider; (in_dim, in_dim), or (in_dim,) of a diagonal."""
        return self.side_A.widened()

    @property
    def widened_G(self) -> Tensor:  # noqa: N802 - the field's own symbol
        """G times its scale, in float32 or wider; a diagonal (out_dim,), or (out_dim, out_dim), structured or not."""
        return self.side_G.widened()

    def require_fit(self, gradient: Tensor) -> None:
        """Check that a gradient agrees with the factors.

        Args:
            gradient: Matrix, shape (out_dim, in_dim), with the bias as its last column.

        Raises:
            BiasColumnMismatch: If one has the bias column and the other lacks it, or the shapes
                disagree altogether; the message names both shapes.
        """
        expected = (self.out_dim, self.A.shape[0])
        require_bias_column(self.layer, "gradient", tuple(gradient.shape), expected, bias=self.bias)


def require_bias_column(
    layer: str, what: str, shape: tuple[int, ...], expected: tuple[int, ...], *, bias: bool
) -> None:
    """Raise unless a shape is the expected one; the message names both shapes and the bias column's part in it."""
    if shape == expected:
        return
    column = "with" if bias else "without"
    raise BiasColumnMismatch(
        f"layer `{layer}`: {what} has shape {shape}, but the layer is trained {column} a bias column, "
        f"which makes it {expected}; collect the factors and take the gradient of the same parameters",
        layer=layer,
    )
