"""A treated layer, which turns one module's input and output gradient into rows of statistics.

Each family turns what the hooks see into matrices of *positions*: ``activation_rows`` gives
``a`` as (P, d_in) without the column of ones, ``gradient_rows`` gives ``g`` as (P, d_out).
Positions are ordered example by example, so P/N consecutive rows belong to one example.

A layer of several groups is as many independent maps side by side: d_in and d_out are those of
one, the rows hold all of them one after the other, and each is a row of the results in the end.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

Form = Literal["kronecker", "diagonal", "block", "diagonal_block"]

COMPLEX_NUMBERS = "complex_numbers"
"""Reason of a layer that complex numbers enter or leave, or whose parameters are complex."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """One call of a layer: what entered it, and which of its positions count."""

    entered: Tensor | None
    """The module's input, detached; None once nothing needs it any more."""
    examples: int
    """N: the P positions lie example by example, P/N of each."""
    kept: Tensor | None = None
    """(P,) booleans: the positions that count; None where all do."""
    owners: Tensor | None = None
    """(P,) the example each position belongs to, where they do not lie example by example; else None."""
    role: "TreatedLayer | None" = None
    """Which part of the layer was called, where it has several (``TreatedLayer.roles``)."""
    places: Tensor | None = None
    """Places of the positions that count, where they are known: to find them again waits for the device."""
    lengths: tuple[int, ...] | None = None
    """Positions of each example that count, where they are known to the host."""

    def picked(self, rows: Tensor) -> Tensor:
        """Return, of rows (P, …) with one a position, those of the positions that count."""
        if self.kept is None:
            return rows
        return rows[self.kept] if self.places is None else rows.index_select(0, self.places)

    @property
    def count(self) -> int | None:
        """How many positions count; None where all do."""
        if self.kept is None:
            return None
        return int(self.kept.sum()) if self.places is None else self.places.numel()

    def without_input(self) -> "Use":
        """Return the same call without its input."""
        return replace(self, entered=None)

    def of_examples(self, start: int, stop: int) -> "Use":
        """Restrict the call to examples ``start`` to ``stop``, with views of their positions.

        ``ValueError`` if the positions do not lie example by example.
        """
        if self.owners is not None:
            raise ValueError("the positions of this call do not lie example by example")
        return replace(
            self,
            entered=None if self.entered is None else of_examples(self.entered, self.examples, start, stop),
            examples=stop - start,
            kept=None if self.kept is None else of_examples(self.kept, self.examples, start, stop),
            places=None,
            lengths=None,
        )

    @property
    def input(self) -> Tensor:
        """The module's input, of any shape, which must still be held."""
        if self.entered is None:
            raise ValueError("the input of this call was let go")
        return self.entered


def of_examples(tensor: Tensor, examples: int, start: int, stop: int) -> Tensor:
    """Take the rows of a run of examples.

    Args:
        tensor: Rows of N examples, shape (N · l, …), the l rows of one example behind each other.
        examples: N.
        start, stop: The first example, and the one after the last.

    Returns:
        A view, shape ((stop − start) · l, …).
    """
    each = tensor.shape[0] // examples
    return tensor[start * each : stop * each]


@dataclass(eq=False)
class TreatedLayer(ABC):
    """One module with trainable parameters that a family knows.

    The weight in row-vector convention is (d_out, d_in[+1]): its curvature is G ⊗ A.
    """

    name: str
    module: nn.Module
    weight: bool
    """The weight is trainable."""
    bias: bool
    """The bias is trainable, hence A has a column of ones (last)."""
    also: Mapping[str, nn.Module] = field(default_factory=dict, kw_only=True)
    """Further modules that hold the same parameters, by name: their calls are this layer's."""
    prefix: str | None = field(default=None, kw_only=True)
    """Name of the module, where the layer's own is another."""

    form: ClassVar[Form] = "kronecker"
    why: ClassVar[str] = "A and G are small enough to be held dense and decomposed"

    @property
    def path(self) -> str:
        """The name of its first module; of the model itself it is empty."""
        return self.name if self.prefix is None else self.prefix

    @property
    def watched(self) -> Mapping[str, Tensor]:
        """Parameters, of any shape, to follow through operations; none where the module's calls show everything."""
        return {}

    @property
    @abstractmethod
    def fan_in(self) -> int:
        """Width of ``a`` without the column of ones."""

    @property
    @abstractmethod
    def fan_out(self) -> int:
        """Width of ``g``."""

    @cached_property
    def groups(self) -> int:
        """Independent maps side by side; widths are those of one."""
        return 1

    @cached_property
    def in_dim(self) -> int:
        """Rows of A, the column of ones included; a frozen weight leaves the ones alone."""
        return (self.fan_in if self.weight else 0) + int(self.bias)

    @cached_property
    def out_dim(self) -> int:
        """Rows of G."""
        return self.fan_out

    @property
    def parameters(self) -> tuple[str, ...]:
        """Qualified names of the trainable parameters covered, weight first."""
        own = [name for name, wanted in (("weight", self.weight), ("bias", self.bias)) if wanted]
        return tuple(f"{self.path}.{name}" if self.path else name for name in own)

    @property
    def reason_uncalled(self) -> str:
        """The reason why it is not covered where no data call it."""
        return "no_gradient"

    @property
    def roles(self) -> tuple["TreatedLayer", ...]:
        """The parts that are called, each with modules of its own; the layer itself, unless it has several."""
        return (self,)

    @property
    def holders(self) -> tuple[str, ...]:
        """Names of the modules that hold its parameters."""
        return (self.path, *self.also)

    @property
    def explanation(self) -> str:
        """Why the layer is represented as it is, and who shares it."""
        if not self.also:
            return self.why
        return f"{self.why}; {', '.join(f'`{name}`' for name in self.holders)} share it: their calls are summed"

    @property
    def parameter_count(self) -> int:
        """Trainable numbers covered."""
        return self.groups * self.in_dim * self.out_dim

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the layer's rows in the results: its own, or one for each group."""
        return _numbered(self.name, self.groups)

    @cached_property
    def part_parameters(self) -> tuple[tuple[str, ...], ...]:
        """The parameters that each of ``parts`` covers, or one group's share of each."""
        return tuple(zip(*(_numbered(name, self.groups) for name in self.parameters), strict=True))

    @abstractmethod
    def activation_rows(self, entered: Tensor) -> Tensor:
        """Read an input as rows of positions.

        Args:
            entered: The module's input, shape as the module takes it.

        Returns:
            ``a`` without the column of ones, shape (P, groups · d_in).
        """

    @abstractmethod
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Read an output gradient as rows of positions.

        Args:
            gradient: Gradient of the loss with respect to the module's output, of the output's shape.

        Returns:
            ``g``, shape (P, groups · d_out).
        """

    def pair(self, use: Use, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return both sides of one call, row by row the same positions.

        Args:
            use: The call, its input still held.
            gradient: Gradient of its output, of the output's shape.

        Returns:
            ``a`` without the ones, shape (P, groups · d_in), and ``g``, shape (P, groups · d_out).
        """
        return (use.role or self).activation_rows(use.input), self.gradient_rows(gradient)

    def of_call(self, entered: Tensor, output: Tensor) -> Self:  # noqa: ARG002 - most read the input alone
        """Return the layer as a call with this input and output has it, each examples first."""
        return self

    def as_stored(self, weight: Tensor) -> Tensor:
        """Arrange a weight (groups, d_out, d_in) as the layer's parameter stores it.

        Args:
            weight: In row-vector convention, each group's by itself.

        Returns:
            A view or copy with the numbers in the parameter's own order; its shape may be flat.
        """
        return weight.reshape(-1)

    def batch_first(self, entered: Tensor, examples: int) -> bool:
        """Return whether rows of an input are separable by example.

        Args:
            entered: The module's input.
            examples: Examples N of the batch.

        Returns:
            True for the shapes (N · l, d) and (N, …, d).
        """
        if entered.ndim == 2:
            return entered.shape[0] % examples == 0
        return entered.ndim > 2 and entered.shape[0] == examples


@dataclass(eq=False)
class BlockLayer(TreatedLayer):
    """A layer small enough for its exact block: per-example gradients instead of A and G.

    The block stands in G over (weight, bias), and A is the 1×1 matrix 1.
    """

    form: ClassVar[Form] = "block"
    why: ClassVar[str] = "an elementwise scale and shift has no matrix to factorise: its exact block is kept"

    @override
    @property
    def fan_out(self) -> int:
        return self.fan_in

    @override
    @cached_property
    def in_dim(self) -> int:
        return 1

    @override
    @cached_property
    def out_dim(self) -> int:
        return self.fan_out * (int(self.weight) + int(self.bias))

    @override
    def activation_rows(self, entered: Tensor) -> Tensor:
        return self.normalised(entered)

    @abstractmethod
    def normalised(self, entered: Tensor) -> Tensor:
        """Normalise an input: x̂ is what the affine weight multiplies.

        Args:
            entered: The module's input, shape as the module takes it.

        Returns:
            x̂ without the affine part, shape (P, d).
        """

    def example_gradients(self, use: Use, gradient: Tensor) -> Tensor:
        """Compute the gradient of each example's loss with respect to (weight, bias), ``(Σ_t x̂_t ∘ g_t, Σ_t g_t)``.

        Args:
            use: The call, its input still held; positions that do not count add nothing.
            gradient: Gradient of its output, of the output's shape.

        Returns:
            One row per example, shape (N, out_dim).
        """
        rows = self.gradient_rows(gradient)
        if use.kept is not None:
            rows = rows * use.kept[:, None]
        parts = []
        if self.weight:
            parts.append((self.normalised(use.input) * rows).view(use.examples, -1, self.fan_out).sum(1))
        if self.bias:
            parts.append(rows.view(use.examples, -1, self.fan_out).sum(1))
        return torch.cat(parts, dim=1)


def _numbered(name: str, groups: int) -> tuple[str, ...]:
    return (name,) if groups == 1 else tuple(f"{name}[{group}]" for group in range(groups))


def factor_sides(layer: TreatedLayer, *, follows: bool) -> Iterator[tuple[int, int]]:
    """Yield the shape of each factor that a layer holds itself.

    Args:
        follows: Whether it shares the A of another, and holds none.

    Returns:
        (groups, rows) of G, then of A; a diagonal factor is so many groups of one row.
    """
    yield (layer.out_dim, 1) if layer.form == "diagonal_block" else (layer.groups, layer.out_dim)
    if not follows and layer.form not in ("block", "diagonal_block"):
        yield (layer.in_dim, 1) if layer.form == "diagonal" else (layer.groups, layer.in_dim)


def pooled_rows(rows: Tensor, use: Use) -> tuple[Tensor, int]:
    """Average the rows of each example over its positions that count; one without any is left out.

    Args:
        rows: Rows of one call, shape (P, d), any float dtype.
        use: The call: its examples, and which of its positions count.

    Returns:
        The means, shape (n, d) for the n examples with a position, and the number of positions: `reduce` of
        Eschenhagen et al. (2023), Kronecker-factored approximate curvature for modern neural network architectures.
    """
    examples, kept = use.examples, use.kept
    if use.owners is not None:
        owners = use.picked(use.owners)
        numbers = torch.bincount(owners, minlength=examples)
        means = summed_rows(rows, use) / numbers.clamp_min(1)[:, None].to(rows.dtype)
        return means[numbers > 0], owners.shape[0]
    if rows.shape[0] == 0:
        # an expert that no token chose
        return rows, 0
    grouped = rows.view(examples, -1, rows.shape[-1])
    if kept is None:
        return grouped.mean(1), rows.shape[0]
    weights = kept.view(examples, -1, 1).to(rows.dtype)
    counts = weights.sum(1)
    means = (grouped * weights).sum(1) / counts.clamp_min(1)
    # an example without any would be a row of zeros
    reaches_all = use.lengths is not None and 0 not in use.lengths
    return means if reaches_all else means[counts[:, 0] > 0], use.count or 0


def summed_rows(rows: Tensor, use: Use) -> Tensor:
    """Sum the rows of each example over its positions that count.

    Args:
        rows: Rows of one call, shape (P, d), any float dtype.
        use: The call: its examples, and which of its positions count.

    Returns:
        The sums, shape (N, d).
    """
    counted = rows if use.kept is None else rows * use.kept[:, None]
    if use.owners is None:
        return counted.view(use.examples, -1, rows.shape[-1]).sum(1)
    return rows.new_zeros(use.examples, rows.shape[-1]).index_add_(0, use.owners, counted)
