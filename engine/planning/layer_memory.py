"""Bytes of layers: what a dry run has shown of them, and what each will hold by that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from catalog.collection import Collection
from engine.accumulation.batch_variance import activation_refusal, gradient_refusal
from engine.factors.low_rank import basis_bytes, gram_bytes
from engine.factors.representation import DENSE, Representation
from engine.layers.layer import TreatedLayer
from engine.layers.tied import TiedHeadLayer
from engine.memory.plan import Source, Stage, Term
from engine.model.activation_memory import Saved
from engine.row_layout.layer_calls import Call
from engine.workspace import Workspace

AT_A_NORMALISATION = 7
"""Times its output that a normalisation takes on the way back, counted in a residual network: what arrives by two
branches, what is handed on, and copies of both, centred, and their product."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a forward pass of very few examples has shown."""

    calls: list[Call]
    """Every call of a treated layer, with its tensors."""
    examples: int
    outputs: int
    """Numbers in the model's outputs."""
    head: TreatedLayer | None = None
    """The linear layer whose output is the loss's logits, if there is one."""
    saved: Saved | None = None
    """What autograd saves; None where nothing is pulled back."""
    recomputed: Saved | None = None
    """The same with activation checkpointing; None where the model offers none."""
    met: Saved | None = None
    """What is held where the gradients of a layer arrive: what was saved up to its call, all inputs, and gradients."""
    met_normalised: Saved | None = None
    """The same where those of a normalisation do, with all that is made of them."""
    repeated: bool = False
    """A direction is pulled back again until all its gradients are finite, for which they wait for each other."""
    resident_bytes: int | None = None
    """What the process holds without the plan's own needs; None: what it holds now."""
    representations: Mapping[str, Representation] = field(default_factory=dict)
    """How the layers keep their G; dense where a layer is not named."""

    def kept(self, layer: TreatedLayer) -> Representation:
        """How one layer keeps its G."""
        return self.representations.get(layer.name, DENSE)

    def sides(self, layer: TreatedLayer, *, follows: bool) -> list[tuple[int, bool]]:
        """Rows of each factor the layer sums itself, and whether it is dense; no G that is kept as rows."""
        every = sides_of(layer, follows=follows)
        return every if self.kept(layer).kind == "dense" else every[1:]


@dataclass(frozen=True, kw_only=True)
class Narrower:
    """The same job with less of its head's G."""

    layer: str
    """The head."""
    seen: DryRun
    """With the head kept so."""
    kept: str
    """What is kept of its G, in words."""

    @property
    def why(self) -> str:
        """Of the head's representation."""
        return self.seen.representations[self.layer].why


def members_of(treated: Sequence[TreatedLayer], shared: dict[str, str]) -> dict[tuple[str, ...], list[TreatedLayer]]:
    """Layers of one shared A stay together, in the order of the first."""
    members: dict[str, list[TreatedLayer]] = {}
    for layer in treated:
        members.setdefault(shared.get(layer.name, layer.name), []).append(layer)
    return {tuple(layer.name for layer in group): group for group in members.values()}


def group_bytes(
    treated: Sequence[TreatedLayer],
    shared: dict[str, str],
    item: int,
    seen: DryRun,
    device: torch.device,
    varied: Collection | None = None,
) -> dict[tuple[str, ...], int]:
    """Bytes of the sums and gradient rows of layers that stay together, where the sums stand.

    With ``varied``, the collection that they are made by, those of a second set where it asks for their variance.
    """
    return {
        names: sum(
            _summed_bytes(layer, seen, item, follows=layer.name in shared)
            + (0 if varied is None else _varied_bytes(layer, seen, item, varied, follows=layer.name in shared))
            + (0 if _elsewhere(layer, seen, device) else _row_bytes(layer, seen))
            for layer in group
        )
        for names, group in members_of(treated, shared).items()
    }


def _summed_bytes(layer: TreatedLayer, seen: DryRun, item: int, *, follows: bool) -> int:
    sides = seen.sides(layer, follows=follows)
    return item * layer.groups * sum(side * side if dense else side for side, dense in sides)


def _varied_bytes(layer: TreatedLayer, seen: DryRun, item: int, collection: Collection, *, follows: bool) -> int:
    """Bytes of the sums that the variance over batches sets aside."""
    if not collection.batch_variance:
        return 0
    gradient, *activation = sides_of(layer, follows=follows)
    sides = activation if activation_refusal(layer) is None else []
    if gradient_refusal(layer, seen.kept(layer).kind, collection.fisher) is None:
        sides.append(gradient)
    return item * layer.groups * sum(side * side if dense else side for side, dense in sides)


def _row_bytes(layer: TreatedLayer, seen: DryRun) -> int:
    kept = seen.kept(layer)
    return 0 if kept.kind == "dense" else kept.held_bytes(layer)


def _elsewhere(layer: TreatedLayer, seen: DryRun, device: torch.device) -> bool:
    """Whether its gradient rows stand on the host though the device computes."""
    return device.type == "cuda" and seen.kept(layer).on_host


def kept_terms(
    workspace: Workspace,
    treated: Sequence[TreatedLayer],
    seen: DryRun,
    shared: dict[str, str],
    *,
    offload: bool,
    several: bool,
) -> list[Term]:
    """Gradient rows that stand on the host, and factors that are not laid aside."""
    terms: list[Term] = []
    apart = sum(_row_bytes(layer, seen) for layer in treated if _elsewhere(layer, seen, workspace.machine.device))
    if apart:
        terms.append(Term(name="gradient rows", formula="Σ T · out", size_bytes=apart, place="host", source="exact"))
    if several:
        return terms
    item = 8 if workspace.options.collection.dtype == "float64" else 4
    width = _stored_size(workspace.options.collection.storage_dtype, item)
    # rows that stand on the host stay where they are
    stored = sum(_row_bytes(layer, seen) for layer in treated) - apart
    stored += sum(_summed_bytes(layer, seen, width, follows=layer.name in shared) for layer in treated)
    # on the host they take the place of the sums, a layer at a time
    when: Stage = "decomposition" if offload or workspace.machine.device.type != "cuda" else "throughout"
    terms.append(
        Term(name="factors", formula="Σ in² + Σ out²", size_bytes=stored, place="host", source="exact", stage=when)
    )
    return terms


def row_sizes(treated: Sequence[TreatedLayer], seen: DryRun, item: int) -> list[tuple[str, str, int, Source, Stage]]:
    """What gradient rows take besides themselves."""
    kept = [(layer, seen.kept(layer)) for layer in treated if seen.kept(layer).kind != "dense"]
    if not kept:
        return []
    gram = max(
        (gram_bytes(rows, layer.out_dim) for layer, each in kept if (rows := each.gram_rows(layer.out_dim))), default=0
    )
    basis = max(basis_bytes(each.rows, layer.out_dim) if each.basis else 0 for layer, each in kept)
    # a triangle and as many rows again are made one: they, and the factorisation's copy
    merged = max((4 * layer.out_dim**2 for layer, each in kept if each.rows > layer.out_dim), default=0)
    return [
        ("Gram matrix", "4 · T² · 8, and chunks of 2²¹ numbers, most gradient rows", gram, "exact", "decomposition"),
        ("basis of gradient rows", "T · n · 8, widest layer", basis, "exact", "decomposition"),
        ("merged gradient rows", "2 · 2n · n, widest layer", merged * item, "exact", "collection"),
    ]


def _stored_size(storage_dtype: str | None, item: int) -> int:
    return item if storage_dtype is None else torch.empty((), dtype=getattr(torch, storage_dtype)).element_size()


def sides_of(layer: TreatedLayer, *, follows: bool) -> list[tuple[int, bool]]:
    """Rows of each factor the layer holds itself, and whether it is dense."""
    sides = [(layer.out_dim, layer.form != "diagonal_block")]
    if not follows and layer.form not in ("block", "diagonal_block"):
        sides.append((layer.in_dim, layer.form == "kronecker"))
    if isinstance(layer, TiedHeadLayer):
        # beside the head's: counts of the table's ids, moments of its vectors, the diagonal of the head's own G
        sides += [(layer.fan_out, False), (layer.fan_in, True), (layer.fan_out, False)]
    return sides
