"""Row moments: what two numbers of a sum of outer products must be, from the rows that enter it, one call at a time.

For ``S = Σ r rᵀ`` and a seeded vector v the trace is ``Σ ‖r‖²`` and the form ``vᵀSv`` is ``Σ (r·v)²``: two scalars for
each group, and no row is kept. A convolution's patches are not written out: ``r·v`` over all of them is the layer's own
map with v in the weight's place, and their squares are those of the input under a weight of ones.

The same two numbers are read from what a layer's statistics have summed (``SumMoments``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.accumulation.gradient_rows import GradientRows, ProbabilityRows
from engine.accumulation.sketched_rows import SketchRows
from engine.factors.kronecker_factors import mirrored_
from engine.layers.convolution import ConvolutionLayer, TransposedConvolutionLayer
from engine.layers.layer import TreatedLayer, Use
from engine.linalg.eigendecomposition import is_diagonal
from engine.model.counter_rng import normals

_PERIOD = 8191
"""Numbers of a vector after which it repeats itself."""
NUMBERS_AT_ONCE = 2**20
"""Numbers of rows that are taken in at once, in float64."""
_PROBABILITIES_AT_ONCE = 2**17
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def seeded_numbers(seed: int, side: int, device: torch.device) -> Tensor:
    """Draw standard normal numbers (8191,) that the vectors of one side of all layers are made of, in float64.

    They are a function of the job's seed and the side's number alone.
    """
    return normals(seed, side, torch.arange(_PERIOD, device=device))


def vector_of(numbers: Tensor, shape: tuple[int, int]) -> Tensor:
    """Make the vector of one side of a layer, of a shape (groups, numbers of each).

    It has the 8191 numbers of the side, the same ones again after the last.
    """
    count = shape[0] * shape[1]
    return numbers.repeat(-(-count // numbers.numel()))[:count].view(shape)


@dataclass(eq=False)
class RowMoments:
    """Trace and form of one side of a layer, from its rows so far."""

    vector: Tensor
    """v (groups, n) float64, the column of ones' last where there is one."""
    dtype: torch.dtype
    """Precision in which rows are multiplied: that of the sums, or a wider one of the rows."""
    squares: Tensor
    """(groups,) float64 ``Σ ‖r‖²``."""
    forms: Tensor
    """(groups,) float64 ``Σ (r·v)²``."""
    rows: float = 0.0
    """Rows so far."""
    pooled: Tensor | float = 0.0
    """(groups,) float64 ``Σ (Σ ‖r‖)²`` of rows that were added up to one: what those may have lost by cancelling."""

    @classmethod
    def of(cls, vector: Tensor, dtype: torch.dtype) -> "RowMoments":
        """Begin with zeros, without any row; v is (groups, n), and ``dtype`` the precision of the sums."""
        zeros = vector.new_zeros(vector.shape[0])
        return cls(vector=vector, dtype=dtype, squares=zeros, forms=zeros.clone())

    def add_(self, rows: Tensor, *, ones: bool = False) -> None:
        """Take in rows (P, groups · n), the column of ones apart; ``ones`` says whether they have one."""
        groups, width = self.vector.shape[0], self.vector.shape[1] - int(ones)
        self.rows += rows.shape[0]
        self._ones_(rows.shape[0], ones=ones)
        if not width:
            self.forms += rows.shape[0] * self.vector[:, -1].square() if ones else 0.0
            return
        wide = torch.promote_types(rows.dtype, self.dtype)
        vector, last = self.vector[:, :width].to(wide), self.vector[:, -1] if ones else 0.0
        # on a device each piece is some launches, and no copy is made of rows that are wide already
        whole = rows.device.type != "cpu" and rows.dtype == wide
        height = max(1, rows.shape[0] if whole else NUMBERS_AT_ONCE // (groups * width))
        for start in range(0, rows.shape[0], height):
            piece = rows[start : start + height].to(wide).view(-1, groups, width)
            self.squares += torch.linalg.vector_norm(piece, dim=2).to(torch.float64).square().sum(0)
            dots = piece[:, 0] @ vector.T if groups == 1 else torch.einsum("pgn,gn->pg", piece, vector)
            # complex rows enter no sum: were they cut to their real part, this would differ
            self.forms += (dots.to(torch.promote_types(dots.dtype, torch.float64)) + last).abs().square().sum(0)

    def add_pooled_(self, rows: Tensor, use: Use, *, mean: bool, width: int | None = None, ones: bool = False) -> None:
        """Take in one row for each example of a call, the sum or the mean of those of its positions that count.

        The rows are (P, groups · n), of which ``width`` numbers are taken in, None for all; ``ones`` says whether they
        have a column of ones besides.
        """
        whole = pooled(rows, use, self.dtype, mean=mean)
        self.add_(whole if width is None else whole[:, :width], ones=ones)
        groups = self.vector.shape[0]
        norms = torch.linalg.vector_norm(rows.reshape(rows.shape[0], groups, rows.shape[1] // groups), dim=2)
        self.pooled = self.pooled + pooled(norms, use, torch.float64, mean=mean).to(torch.float64).square().sum(0)

    def add_ids_(self, ids: Tensor) -> None:
        """Take in one-hot rows by the places of the ones, (P,)."""
        self.rows += ids.numel()
        self.squares += ids.numel()
        self.forms += self.vector[0, ids.long()].square().sum()

    def add_diagonal_(self, rows: Tensor) -> None:
        """Take in rows (P, groups · n) of which the sum keeps the squares alone: the form is that of the diagonal."""
        self.rows += rows.shape[0]
        height = max(1, NUMBERS_AT_ONCE // max(1, self.vector.numel()))
        for start in range(0, rows.shape[0], height):
            squares = rows[start : start + height].to(torch.float64).square().sum(0).view_as(self.vector)
            self.squares += squares.sum(1)
            self.forms += (squares * self.vector.square()).sum(1)

    def add_probabilities_(self, logits: Tensor, weights: Tensor, *, diagonal: bool) -> None:
        """Take in ``Σ ω (diag p − p pᵀ)`` of logits (P, V) and ω (P,) in float64.

        With ``diagonal`` the form is that of the diagonal alone.
        """
        own = self.vector[0]
        self.rows += logits.shape[0]
        height = max(1, _PROBABILITIES_AT_ONCE // logits.shape[1])
        for start in range(0, logits.shape[0], height):
            weight = weights[start : start + height]
            p = torch.softmax(logits[start : start + height].to(torch.float64), 1)
            rest = p * (p.sum(1, keepdim=True) - p)
            self.squares += (rest.sum(1) * weight).sum()
            # Σ p v² − (Σ p v)², without its cancellation
            centred = own - (p @ own)[:, None]
            form = (rest * own.square()).sum(1) if diagonal else (p * centred.square()).sum(1)
            self.forms += (form * weight).sum()

    def add_patches_(self, layer: ConvolutionLayer, use: Use, *, means: bool) -> None:
        """Take in the patches of one call of a convolution."""
        entered = use.input.to(torch.promote_types(use.input.dtype, self.dtype))
        width, last = layer.fan_in if layer.weight else 0, self.vector[:, -1] if layer.bias else 0.0
        positions = layer.geometry(entered.shape).positions
        if means or not width:
            # a few numbers an example, so that its patches may be written out
            for place in range(entered.shape[0]):
                patches = layer.activation_rows(entered[place : place + 1])
                self.add_(
                    (patches.mean(0, keepdim=True) if means else patches)[:, : width * layer.groups], ones=layer.bias
                )
            return
        self.rows += positions
        self._ones_(positions, ones=layer.bias)
        kernel = self.vector[:, :width].to(entered.dtype)
        self.squares += _applied(layer, entered.square(), torch.ones_like(kernel)).to(torch.float64).sum((0, 2))
        self.forms += (_applied(layer, entered, kernel).to(torch.float64) + _column(last)).square().sum((0, 2))

    def _ones_(self, rows: int, *, ones: bool) -> None:
        self.squares += rows * int(ones)


def _column(numbers: Tensor | float) -> Tensor | float:
    return numbers[:, None] if isinstance(numbers, Tensor) else numbers


def _applied(layer: ConvolutionLayer, entered: Tensor, kernel: Tensor) -> Tensor:  # (N, groups, positions)
    """The layer's own map, of one output for each group, with ``kernel`` (groups, d_in) as its weight."""
    module = layer.module
    if not isinstance(layer, TransposedConvolutionLayer):
        weight = kernel.view(layer.groups, -1, *module.kernel_size)
        return module._conv_forward(entered, weight, None).flatten(2)  # noqa: SLF001 - the padding modes are there
    weight = layer.as_stored(kernel[:, None]).reshape(-1, 1, *module.kernel_size)
    apply: Callable[..., Tensor] = _TRANSPOSED[len(module.kernel_size) - 1]
    options = (module.stride, module.padding, layer.output_padding, module.groups, module.dilation)
    return apply(entered, weight, None, *options).flatten(2)


def pooled(rows: Tensor, use: Use, dtype: torch.dtype, *, mean: bool) -> Tensor:
    """Sum the rows (P, d) of each example of a call over its positions that count, or average them, in ``dtype``.

    One row an example, (n, d); an example without a position is left out of means.
    """
    wide = rows.to(torch.promote_types(rows.dtype, dtype))
    owners = use.owners
    if owners is None:
        owners = torch.arange(use.examples, device=rows.device).repeat_interleave(rows.shape[0] // use.examples)
    wide, owners = use.picked(wide), use.picked(owners)
    sums = wide.new_zeros(use.examples, rows.shape[1]).index_add_(0, owners, wide)
    if not mean:
        return sums
    counts = torch.bincount(owners, minlength=use.examples)
    return sums[counts > 0] / counts[counts > 0, None].to(sums.dtype)


def counted_rows(layer: TreatedLayer, use: Use) -> Tensor:
    """Read the rows of one call's input at the positions that count: (P, groups · d_in), or ids (P,)."""
    return use.picked(layer.activation_rows(use.input))


_MIRRORED = 64
"""Rows of a matrix that is mirrored as the factor will be; of a larger one as many, evenly spaced."""
_STRIP, _STRIP_ON_DEVICE = 128, 1024
"""Rows that are read at once; on a device each strip is some launches."""
_NUMBERS_AT_ONCE = 2**17


@dataclass(frozen=True)
class SumMoments:
    """Trace and form of one side of a layer, from its sums."""

    squares: Tensor
    """(groups,) float64."""
    forms: Tensor
    """(groups,) float64."""
    dtype: torch.dtype
    """The narrowest precision that the sums are kept in."""
    rounding: float = 0.0
    """Most that the numbers of a row were changed before they were multiplied, relative to each."""
    mirroring: Tensor | None = None
    """(groups,) float64: difference of the mirrored rows' form from that of their triangle, over their trace; None of
    a matrix that is mirrored as a whole, whose form has it."""


def of_sum(total: Tensor, vector: Tensor, rounding: float = 0.0) -> SumMoments:
    """Return trace and form of a sum of outer products, or of its diagonal.

    The sum is (groups, n, n) or (n, n), of which the upper triangle counts; or (n,). The vector v (groups, n) is in
    float64. ``rounding`` is the most that the products changed a number, relative to it; a diagonal is made by none.
    256 Ki numbers are held; on a device 2 Mi.
    """
    own = vector.to(total.device)
    if is_diagonal(total):
        wide = total.to(torch.float64)
        return SumMoments(wide.sum()[None], (wide @ own[0].square())[None], total.dtype)
    total = total if total.ndim == 3 else total[None]
    squares = total.diagonal(dim1=1, dim2=2).to(torch.float64).sum(1)
    size = total.shape[1]
    if size > _MIRRORED:
        forms, mirroring = torch.stack([_form(*each) for each in zip(total, own, strict=True)]).T
        return SumMoments(squares, forms, total.dtype, rounding, mirroring)
    step, forms = max(1, _NUMBERS_AT_ONCE // max(1, size * size)), torch.empty_like(squares)
    for start in range(0, total.shape[0], step):
        forms[start : start + step] = _whole(total[start : start + step], own[start : start + step])
    return SumMoments(squares, forms, total.dtype, rounding)


def _whole(total: Tensor, own: Tensor) -> Tensor:
    matrix = mirrored_(total.clone())
    products = torch.matmul(matrix, own.to(matrix.dtype)[:, :, None])[:, :, 0]
    return (products.to(torch.float64) * own).sum(1)


def _form(matrix: Tensor, own: Tensor) -> Tensor:
    """The form (2,) of a large matrix by its upper triangle, with some rows and columns as they are mirrored.

    Beside it the difference that those make, over their trace: it is rounding, however the triangle was summed.
    """
    last = matrix.shape[0] - 1
    places = torch.arange(_MIRRORED, device=matrix.device).mul_(last).div_(_MIRRORED - 1, rounding_mode="floor")
    some, mine = matrix[places[:, None], places], own[places]
    mirrored = _whole(some[None], mine[None])[0] - _upper(some, mine)
    trace = some.diagonal().to(torch.float64).sum() + torch.finfo(matrix.dtype).tiny
    return torch.stack([_upper(matrix, own) + mirrored, mirrored.abs() / trace])


def _upper(matrix: Tensor, own: Tensor) -> Tensor:
    narrow, form = own.to(matrix.dtype), -(matrix.diagonal().to(torch.float64) @ own.square())
    strip = _STRIP if matrix.device.type == "cpu" else _STRIP_ON_DEVICE
    for start in range(0, matrix.shape[0], strip):
        stop = start + strip
        products = matrix[start:stop, start:stop].triu() @ narrow[start:stop]
        if stop < matrix.shape[0]:
            products += matrix[start:stop, stop:] @ narrow[stop:]
        form += 2 * (own[start:stop] @ products.to(torch.float64))
    return form


def in_order_of_sums(layer: TreatedLayer, vector: Tensor) -> Tensor:
    """Arrange a vector in the weight's order as the sums of A have it: those of a convolution, kernel before channels.

    v is (groups, in_dim); the result is a copy for a convolution.
    """
    width = layer.fan_in if layer.weight else 0
    if not isinstance(layer, ConvolutionLayer) or not width:
        return vector
    places = vector[:, :width].view(vector.shape[0], -1, layer.module.weight[0, 0].numel()).transpose(1, 2)
    places = places.flip(1) if layer.module.transposed else places
    return torch.cat([places.reshape(vector.shape[0], width), vector[:, width:]], 1)


def of_rows(kept: GradientRows, vector: Tensor) -> SumMoments:
    """Return trace and form of the G that kept rows stand for; of a sketch its diagonal's.

    A sketch leaves out what its bound says, so no form of its rows is exact: the diagonal beside it is. The rows of one
    batch are gradients, or probabilities with their weights; v (groups, n) is in float64.
    """
    if isinstance(kept, SketchRows) and kept.diagonals is not None:
        own = vector.to(kept.diagonals.device).square()
        return SumMoments(kept.diagonals.sum(1), (kept.diagonals * own).sum(1), kept.rows.dtype)
    groups = kept.rows.shape[0]
    squares = vector.new_zeros(groups, device=kept.rows.device)
    forms, own = squares.clone(), vector.to(kept.rows.device)
    height = max(1, _NUMBERS_AT_ONCE // kept.size)
    for group in range(groups):
        for start in range(0, kept.count, height):
            stop = min(start + height, kept.count)
            rows = kept.rows[group, start:stop].to(torch.float64)
            scales = kept.scales[group, start:stop].to(rows.device)
            if isinstance(kept, ProbabilityRows):
                rows /= rows.sum(1, keepdim=True)
                squares[group] += ((rows * (1 - rows)).sum(1) * scales).sum()
                centred = own[group] - (rows @ own[group])[:, None]
                forms[group] += ((rows * centred.square()).sum(1) * scales).sum()
            else:
                squares[group] += (rows.square().sum(1) * scales.square()).sum()
                forms[group] += ((rows @ own[group]) * scales).square().sum()
        if kept.triangle is not None:
            triangle = kept.triangle[group]
            squares[group] += torch.linalg.vector_norm(triangle, dim=1).to(torch.float64).square().sum()
            forms[group] += (triangle @ own[group].to(triangle.dtype)).to(torch.float64).square().sum()
    return SumMoments(squares, forms, kept.rows.dtype)
