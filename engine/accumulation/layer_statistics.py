"""Statistics of one layer while it is collected: the running sums behind A, G and the exact trace.

``A = Σ a aᵀ / positions`` and ``G = Σ g gᵀ / terms`` (`expand`); under `reduce`, ``a`` is averaged
and ``g`` summed over the positions of each example first, and A divides by examples. With an
exponential moving average every sum *and* its count decay alike, so early batches are weighted
without bias.

The trace of the layer's block of the Fisher itself is ``R = Σ s_n / Σ m_n`` for ``s_n`` the squared
norm of example n's gradient, summed over directions, and ``m_n`` its loss terms.

References:
    Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature
    Eschenhagen et al. (2023), Kronecker-factored approximate curvature for modern neural network architectures
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, assert_never

import torch
from torch import Tensor
from typing_extensions import override

from engine.accumulation.batch_variance import BatchVariance
from engine.accumulation.example_gradients import Met, block_gradients, squared_norms
from engine.accumulation.gradient_rows import GradientRows, ProbabilityRows, RowStorage, Terms
from engine.accumulation.sketched_rows import SketchRows
from engine.accumulation.sums import Sums, larger
from engine.factors.representation import DENSE, Representation
from engine.layers.convolution import ConvolutionLayer
from engine.layers.layer import BlockLayer, TreatedLayer, Use, pooled_rows, summed_rows
from engine.linalg.gram import add_gram_, add_grams_, require_real
from engine.memory.host_accumulation import Staging
from engine.merging.estimates import exact_trace
from engine.model.mixed_precision import Precision

UNORDERED = "its rows do not stand example by example, so there is no exact trace"


@dataclass(eq=False)
class LayerStatistics(Sums):
    """Sums of one layer; a follower leaves A to the layer that shares its input."""

    NOT_SAVED: ClassVar[Mapping[str, str]] = {
        "layer": "every attempt finds it; the set of layers is among a checkpoint's conditions",
        "leader": "it follows from what the state of the collection says of sharing",
        "representation": "it follows from the plan",
        **dict.fromkeys(("sums_dtype", "precision"), "an option of the collection"),
        **dict.fromkeys(("staging", "row_staging"), "a way to the host, empty between two batches"),
    }
    DECAYED: ClassVar[Sequence[str]] = ("A", "G", "weight_A", "weight_G")
    JOINED: ClassVar[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
        **dict.fromkeys(("weight_A", "weight_G", "rows_A", "rows_G", "positions", "terms"), sum),
        **dict.fromkeys(("gradients", "examples", "weights_squared"), sum),
        **dict.fromkeys(("calls", "largest"), max),
        "flaw": lambda flaws: next(filter(None, flaws), None),
        "ordered": all,
        "unproven": any,
    }

    layer: TreatedLayer
    sharing: str
    leader: "LayerStatistics | None" = None
    representation: Representation = DENSE
    """How G is kept."""
    sums_dtype: torch.dtype | None = None
    """Precision of the sums, once they are allocated."""
    precision: Precision = field(default_factory=Precision)
    """Precision of the products that are added to them."""
    A: Tensor | None = None
    G: Tensor | None = None
    """None where its rows are kept instead."""
    gradient_rows: GradientRows | None = None
    """The rows whose outer products G sums; None where G itself is summed."""
    weight_A: float = 0.0
    """Positions (or examples, under `reduce`), decayed with the sums."""
    weight_G: float = 0.0
    """Loss terms, decayed with the sums."""
    rows_A: int = 0
    """Rows that entered A: no factor has a larger rank than rows."""
    rows_G: int = 0
    """Rows that entered G."""
    positions: int = 0
    """Positions that entered A."""
    terms: int = 0
    """Loss terms of the batches in which a gradient arrived or could have."""
    calls: int = 0
    """Most calls of the module in one forward pass."""
    gradients: int = 0
    """Backward hooks that fired."""
    flaw: str | None = None
    """The reason why the layer is not covered, once one is found."""
    staging: Staging | None = None
    """How contributions reach the sums where these stand on the host."""
    row_staging: Staging | None = None
    """How gradient rows reach the host where they stand there and the sums do not."""
    variance_A: BatchVariance = field(default_factory=BatchVariance)
    """Variance of A over batches; a leader's where A is."""
    variance_G: BatchVariance = field(default_factory=BatchVariance)
    ordered: bool = True
    """Whether the example of each row is known."""
    traced: bool = False
    """The exact trace is wanted."""
    squares: Tensor | None = None
    """(3, groups) float64: Σ s, Σ s² and Σ s·m over examples; the first decays as G does."""
    examples: int = 0
    """Examples that entered ``squares``."""
    weights_squared: float = 0.0
    """Σ m² over the same examples."""
    norms: Tensor | None = None
    """(N, groups) float64: s of the current batch's examples, as far as its directions are done."""

    total_A: float | None = None
    """The count that A is divided by, once the pass is done."""
    total_G: float | None = None
    """The same of G."""
    trace_sums: list[float | None] = field(default_factory=list)
    """``squares`` of each group, once the pass is done, one group behind the other."""
    partial: bool = False
    """The data are a part: what they do not call is kept as zeros, for the other parts may."""
    unproven: bool = False
    """Inputs entered A, and no gradient had arrived by the end of a batch that had loss terms."""
    largest: Tensor | float = 0.0
    """Largest |g| that entered G, of which the square may be zero; on the device until the pass is read."""
    exact_traces: list[float | None] = field(default_factory=list)
    """Trace of each group's block of the curvature of the mean loss, once the pass is done; None where it overflows."""
    standard_errors: list[float | None] = field(default_factory=list)
    """Standard error of each exact trace over the examples as a sample; None for one example alone."""

    @property
    def rank_bounds(self) -> tuple[int, int]:
        """Rows that entered A and G, where their ranks cannot exceed those; 0 bounds nothing."""
        return self.rows_A, self.rows_G

    @property
    def explanation(self) -> str:
        """Why the layer is represented as it is."""
        unordered = "" if self.ordered else UNORDERED
        return "; ".join(filter(None, (self._layer_explanation, unordered, self.representation.why)))

    @property
    def _layer_explanation(self) -> str:
        """The layer's own, but for what does not hold of a G that is not dense."""
        own = self.layer.explanation
        usual = self.representation.kind == "dense" or self.layer.why != TreatedLayer.why
        return own if usual else own.removeprefix(TreatedLayer.why).removeprefix("; ")

    @property
    def needs_order(self) -> bool:
        """Whether A and G are more than sums over all rows."""
        plain = self.layer.roles == (self.layer,) and self.layer.form in ("kronecker", "diagonal")
        return not plain or self.sharing == "reduce"

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the zeroed sums in a precision, on the device of the passes or on the host where there is a staging.

        Memory:
            in_dim² (or in_dim) and out_dim² numbers of each group, unless A is a leader's; or the foreseen gradient
            rows in place of the latter.
        """
        place = torch.device("cpu") if self.staging is not None else device
        layer = self.layer
        self.sums_dtype = dtype
        groups = (layer.groups,) if layer.groups > 1 else ()
        if self.leader is None and layer.form not in ("block", "diagonal_block"):
            shape = (layer.fan_in,) if layer.form == "diagonal" else (*groups, layer.in_dim, layer.in_dim)
            self.A = torch.zeros(shape, dtype=dtype, device=place)
        kept = self.representation
        match kept.kind:
            case "dense":
                sides = (layer.out_dim,) if layer.form == "diagonal_block" else (*groups, layer.out_dim, layer.out_dim)
                self.G = torch.zeros(sides, dtype=dtype, device=place)
            case "diagonal_sketch":
                self.gradient_rows = SketchRows.sketching(
                    layer.groups, layer.out_dim, kept.rank, kept.dtype, device, of_terms=kept.of_terms
                )
            case "woodbury" | "softmax_head":
                storage = RowStorage(
                    capacity=kept.rows,
                    dtype=kept.dtype,
                    working=dtype,
                    arrive=device,
                    stand=torch.device("cpu") if kept.on_host else place,
                    staging=self.row_staging or self.staging,
                )
                kind = ProbabilityRows if kept.kind == "softmax_head" else GradientRows
                self.gradient_rows = kind.empty(layer.groups, layer.out_dim, storage)
            case _:
                assert_never(kept.kind)
        if self.traced:
            self.squares = torch.zeros(3, layer.groups, dtype=torch.float64, device=device)

    @override
    def decay_(self, past: float) -> None:
        super().decay_(past)
        if self.squares is not None:
            self.squares[0] *= past

    def begin_update_(self) -> None:
        """Let the next batch be summed by itself, where its own factors are wanted."""
        self.variance_A.begin_(self.A, self.weight_A)
        self.variance_G.begin_(self.G, self.weight_G)

    def end_update_(self) -> None:
        """Let the batch's factors enter their variance, and its sums those of the batches before."""
        self.variance_A.end_(self.A, self.weight_A)
        self.variance_G.end_(self.G, self.weight_G)

    def add_input_(self, use: Use) -> None:
        """Add ``Σ a aᵀ`` of one call, by the tensor that entered it."""
        layer, called, entered = self.layer, use.role or self.layer, require_real(use.input)
        if isinstance(layer, BlockLayer):
            self.positions += use.count if use.count is not None else entered.numel() // layer.fan_in
            return
        if isinstance(called, ConvolutionLayer):
            self._add_patches_(called, entered)
            return
        rows = layer.activation_rows(entered)
        if layer.form == "diagonal":
            ids = use.picked(rows)
            self.positions += ids.numel()
            self.weight_A += ids.numel()
            if self.A is not None:
                self._add_small_(self.A, torch.bincount(ids, minlength=layer.fan_in))
            return
        if self.sharing == "reduce":
            if self.sums_dtype is not None:
                # a model may compute parts of itself more narrowly (autocast) than the sums are kept
                rows = rows.to(self.sums_dtype)
            rows, positions = pooled_rows(rows, use)
            self.positions += positions
        else:
            rows = use.picked(rows)
            self.positions += rows.shape[0]
        self.weight_A += rows.shape[0]
        self.rows_A += rows.shape[0]
        if self.A is not None:
            self._add_outer_(self.A, rows)

    def _add_patches_(self, layer: ConvolutionLayer, entered: Tensor) -> None:
        """Add a convolution's ``Σ a aᵀ``, whose rows are never all written out."""
        shape = layer.geometry(entered.shape)
        rows = shape.examples if self.sharing == "reduce" else shape.positions
        self.positions += shape.positions
        self.weight_A += rows
        self.rows_A += rows
        if self.A is None:
            return
        patches = layer.patches(entered, self.A.dtype)
        if self.sharing == "reduce":
            self._add_outer_(self.A, patches.means())
            return
        width = layer.fan_in if layer.weight else 0
        if layer.weight:
            with self.precision.adding():
                patches.add_gram_(self.A[..., :width, :width], self.staging)
        if layer.bias:
            if layer.weight:
                self._add_small_(self.A[..., :width, width], patches.sums().view(*self.A.shape[:-2], width))
            self.A[..., width, width] += rows

    def _add_outer_(self, total: Tensor, rows: Tensor) -> None:
        """Add ``Σ [a 1]ᵀ[a 1]`` without writing the column of ones beside every row."""
        layer = self.layer
        width = layer.fan_in if layer.weight else 0
        if layer.weight:
            self._add_gram_(total[..., :width, :width], rows)
        if layer.bias:
            if layer.weight:
                sums = rows.sum(0, dtype=total.dtype).view(*total.shape[:-2], width)
                self._add_small_(total[..., :width, width], sums)
            total[..., width, width] += rows.shape[0]

    @property
    def joint(self) -> bool:
        """Whether inputs and gradients are wanted together."""
        return self.traced or isinstance(self.layer, BlockLayer)

    def add_gradient_(self, use: Use, gradient: Tensor) -> None:
        """Add ``Σ g gᵀ`` of one call and one direction; a block layer's comes with ``add_met_``.

        The gradient has the shape of the call's output, examples first.
        """
        layer = self.layer
        self.gradients += 1
        if self.sums_dtype is None or isinstance(layer, BlockLayer):
            return
        rows = layer.gradient_rows(require_real(gradient))
        if self.sharing == "reduce" and layer.form == "kronecker":
            rows = summed_rows(rows.to(self.sums_dtype), use)
        else:
            # dropped before the product: half of a padded batch is often padding
            rows = use.picked(rows)
        self._add_rows_(rows)

    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        """Add the squares of gradients (n, numbers) by a bare parameter, those of n of N examples from ``start`` on."""
        self.gradients += 1
        if self.G is not None:
            self.largest = larger(self.largest, gradients)
            squares = require_real(gradients).to(self.G.dtype).square()
            self._add_small_(self.G, squares.sum(0))
            if self.traced:
                norms = torch.zeros(examples, 1, dtype=torch.float64, device=squares.device)
                norms[start : start + squares.shape[0]] = squares.sum(1, keepdim=True)
                self._add_norms_(norms)

    def add_terms_(self, logits: Tensor, terms: Terms) -> None:
        """Keep the probabilities of a head's loss terms that count, by its outputs (N, R, V).

        ``TypeError`` if the layer's representation keeps no probabilities.
        """
        self.gradients += 1
        if not isinstance(self.gradient_rows, (ProbabilityRows, SketchRows)):
            raise TypeError(f"layer `{self.layer.name}` keeps no probabilities")
        traces = self.gradient_rows.add_terms_(logits, terms)
        if terms.squares is not None:
            norms = traces.new_zeros(logits.shape[0]).index_add_(0, terms.example, traces * terms.squares)
            self._add_norms_(norms[:, None])

    def add_met_(self, met: Met) -> None:
        """Add what needs inputs and gradients of all calls of one direction together."""
        if self.sums_dtype is None:
            return
        if isinstance(self.layer, BlockLayer):
            gradients = require_real(block_gradients(self.layer, met)).to(self.sums_dtype)
            self._add_rows_(gradients)
            if self.traced:
                self._add_norms_(gradients.to(torch.float64).square().sum(1, keepdim=True))
        elif self.traced:
            self._add_norms_(squared_norms(self.layer, met, self.sums_dtype))

    def _add_rows_(self, rows: Tensor) -> None:
        self.rows_G += rows.shape[0]
        self.largest = larger(self.largest, rows)
        if self.gradient_rows is not None:
            self.gradient_rows.add_(rows)
        elif self.G is not None:
            self._add_gram_(self.G, rows)

    def _add_gram_(self, total: Tensor, rows: Tensor) -> None:
        add = add_gram_ if total.ndim == 2 else add_grams_
        with self.precision.adding():
            add(total, rows, self.staging)

    def _add_small_(self, total: Tensor, numbers: Tensor) -> None:
        """Add a vector's worth of numbers."""
        if self.staging is None:
            total += numbers.to(total.dtype)
        else:
            self.staging.add_(total, lambda made: made.copy_(numbers))

    def _add_norms_(self, norms: Tensor) -> None:
        self.norms = norms if self.norms is None else self.norms + norms

    def end_batch_(self, shares: Tensor, shares_squared: float) -> None:
        """Let the batch's squared norms enter the trace.

        ``shares`` are the loss terms of each example, (N,) float64, ``shares_squared`` is the sum of their squares.
        """
        if self.squares is None:
            return
        self.examples += shares.numel()
        self.weights_squared += shares_squared
        if self.norms is not None:
            self.squares += torch.stack([self.norms.sum(0), self.norms.square().sum(0), shares @ self.norms])
            self.norms = None

    def end_pass_(self) -> None:
        """Turn squared norms into traces and variances, which outlive the sums, as the counts of A and G do."""
        self.total_A, self.total_G, self.largest = self.weight_A, self.weight_G, float(self.largest)
        self.variance_A.end_pass_(self.A, self.weight_A)
        self.variance_G.end_pass_(self.G, self.weight_G)
        if self.squares is None or not self.weight_G:
            return
        for sums in self.squares.T.tolist():
            self.trace_sums += sums
            trace, error = exact_trace((*sums, self.weights_squared), self.weight_G, self.examples)
            self.exact_traces.append(trace)
            self.standard_errors.append(error)
        self.squares = None
