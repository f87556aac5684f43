"""The probe: what a forward pass of one example, repeated, shows of a model before anything large is allocated.

Bytes that each layer will hold follow from its sizes. A self-check copies the inputs of the treated layers and the
gradients of their outputs for a few examples. They stand beside the slice that a pass works on, and afterwards beside
one example alone. The first check comes before the sums are there, later ones stand beside them, and so do the moments
that the first batch's sums are held against. Only what exceeds all this is planned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from catalog.requests.collection import Collection
from engine.accumulation.batch_variance import activation_refusal, gradient_refusal
from engine.collection.pass_job import PassJob
from engine.collection.subsamples import Sizes
from engine.factors.representation import DENSE, Representation
from engine.factors.representation_bytes import basis_bytes, gram_bytes
from engine.gradient_identity.row_moments import NUMBERS_AT_ONCE
from engine.gradient_identity.schedule import FIRST_EXAMPLES
from engine.layers.coverage import Survey
from engine.layers.elementwise import BareLayer
from engine.layers.layer import TreatedLayer
from engine.layers.tied import TiedHeadLayer
from engine.memory.plan import Chosen, Source, Stage, Term
from engine.model.activation_memory import Saved
from engine.row_layout.layer_calls import Call
from engine.tracing.example_contributions import examples_at_once
from engine.workspace import Workspace


class TimedForward(NamedTuple):
    """A forward pass that was timed."""

    examples: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Calls and sizes of the layers in a forward pass of one repeated example; plans follow from them."""

    layers: tuple[TreatedLayer, ...]
    """The layers to be collected."""
    dtype: torch.dtype
    """The precision of the sums."""
    calls: list[Call]
    """Every call of a layer, with its tensors."""
    examples: int
    """Examples in the pass."""
    whole: bool = False
    """They are those of the first batch, and not copies of one."""
    mixed: frozenset[str] = frozenset()
    """Names of layers whose positions belong to no one example."""
    shared: dict[str, str] = field(default_factory=dict)
    """Layers fed by the tensor of another layer, whose A they share: their name, and the other's."""
    outputs: int
    """Numbers in the model's outputs."""
    classes: int
    """Numbers of each loss term: the classes, where there are such."""
    head: TreatedLayer | None = None
    """The linear layer whose output is the loss's logits, if there is one."""
    saved: Saved | None = None
    """Tensors that autograd saves; None where nothing is pulled back."""
    recomputed: Saved | None = None
    """The same with activation checkpointing; None where the model offers none."""
    met: Saved | None = None
    """Tensors held where the gradients of a layer arrive: those saved up to its call, all inputs, and gradients."""
    met_normalised: Saved | None = None
    """The same where those of a normalisation do, with all that is made of them."""
    attention: Saved | None = None
    """Bytes that a GPU's fused attention takes for itself on the way back; None where there is none."""
    repeated: bool = False
    """A direction is pulled back again until all its gradients are finite, for which they wait for each other."""
    resident_bytes: int | None = None
    """Bytes that the process holds without the plan's own needs; None takes those that it holds now."""
    forward: TimedForward | None = None
    """The last forward pass of very few examples; None where none was timed."""
    representations: Mapping[str, Representation] = field(default_factory=dict)
    """How the layers keep their G; dense where a layer is not named."""

    def kept(self, layer: TreatedLayer) -> Representation:
        """Return how one layer keeps its G; dense where the probe names none."""
        return self.representations.get(layer.name, DENSE)

    def sides(self, layer: TreatedLayer, *, follows: bool) -> list[tuple[int, bool]]:
        """Return the rows of each factor that a layer sums itself, and whether it is dense.

        A G that is kept as rows is left out; a layer that follows shares the A of another, and sums none.
        """
        every = sides_of(layer, follows=follows)
        return every if self.kept(layer).kind == "dense" else every[1:]

    def held_bytes(self, layer: TreatedLayer) -> int:
        """Return the bytes of what a layer keeps in place of G; 0 where that is dense."""
        kept = self.kept(layer)
        return 0 if kept.kind == "dense" else kept.held_bytes(layer)

    def packed_bytes(self, item: int) -> int:
        """Return the bytes of all factors as they are written: triangles, diagonals as they are, and gradient rows.

        ``item`` is the bytes of a number of a dense or diagonal factor.
        """
        numbers = sum(
            layer.groups * (side * (side + 1) // 2 if dense else side)
            for layer in self.layers
            for side, dense in self.sides(layer, follows=layer.name in self.shared)
        )
        return item * numbers + sum(map(self.held_bytes, self.layers))


@dataclass(frozen=True, kw_only=True)
class ProbedModel:
    """A model after its probe: how passes run it, which of its layers they collect, and how large those are."""

    job: PassJob
    """The model, and how passes run it, with the row layout that the probe found."""
    survey: Survey
    """The layers to be collected, and those that are not, with their reasons."""
    probe: Probe

    def with_probe(self, probe: Probe) -> "ProbedModel":
        """Replace the probe; the passes take over its representations and head."""
        job = replace(self.job, representations=probe.representations, head=probe.head)
        return replace(self, job=job, probe=probe)

    def for_passes(self, chosen: Chosen, sizes: Sizes | None) -> "ProbedModel":
        """Take over what the plan has chosen for the passes: the slices, and the place of the sums.

        ``sizes`` are the sample sizes that the passes keep; None where they keep none.
        """
        job = replace(self.job, micro_batch=chosen.micro_batch, offload=chosen.offload, sizes=sizes)
        return replace(self, job=job)

    def without_tensors(self) -> "ProbedModel":
        """Return the same without the tensors of the calls, which must not outlive the probe."""
        return replace(self, probe=replace(self.probe, calls=[]))


def sides_of(layer: TreatedLayer, *, follows: bool) -> list[tuple[int, bool]]:
    """Return the rows of each factor that a layer holds itself, G first, and whether it is dense.

    A layer that follows shares the A of another, and holds none.
    """
    sides = [(layer.out_dim, layer.form != "diagonal_block")]
    if not follows and layer.form not in ("block", "diagonal_block"):
        sides.append((layer.in_dim, layer.form == "kronecker"))
    if isinstance(layer, TiedHeadLayer):
        # beside the head's: counts of the table's ids, moments of its vectors, the head's own A and its G's diagonal
        sides += [(layer.fan_out, False), (layer.fan_in, True), (layer.in_dim, True), (layer.fan_out, False)]
    return sides


def check_bytes(
    workspace: Workspace,
    probe: Probe,
    *,
    saved: Saved | None,
    passing: int,
    sums: int,
) -> int:
    """Return the bytes that a check takes beyond what the passes hold when none is made."""
    collection = workspace.options.collection
    if collection.self_check == "off":
        return 0
    kept, own = _rows(probe, min(FIRST_EXAMPLES, collection.batch_size)), _rows(probe, 1)
    # rows that are kept of a batch stand beside what it holds on its way, and beside one example alone afterwards
    first = max(kept - sums, _held(probe, saved) + kept - passing - sums)
    later = own + max(_moments(probe, collection.batch_size), _held(probe, saved) - passing)
    return max(0, first, later)


def _rows(probe: Probe, examples: int) -> int:
    """Return the bytes of the rows of some examples, with their gradients of bare parameters."""
    numbers = sum(call.entered.numel() + call.output.numel() for call in probe.calls) + 2 * probe.outputs
    bare = sum(layer.out_dim for layer in probe.layers if isinstance(layer, BareLayer))
    return examples * (numbers // probe.examples + bare) * probe.dtype.itemsize


def _moments(probe: Probe, examples: int) -> int:
    """Return the bytes of example gradients in float64, of their squares, and of the vector they are multiplied by.

    Other rows are taken in as the pass gives back what it holds of them.
    """
    most = max((examples * layer.out_dim for layer in probe.layers if isinstance(layer, BareLayer)), default=0)
    return 3 * torch.float64.itemsize * min(NUMBERS_AT_ONCE, most)


def _held(probe: Probe, saved: Saved | None) -> int:
    """Return the bytes that one example alone holds: its pass, its rows, and a gradient of the largest weight twice."""
    inputs = sum(call.entered.numel() for call in probe.calls)
    through = inputs * probe.dtype.itemsize // probe.examples if saved is None else saved.of(1)
    weight = max((layer.groups * layer.fan_in * layer.fan_out for layer in probe.layers if layer.weight), default=0)
    work = example_gradients(probe.layers, 1) + 2 * weight
    return through + _rows(probe, 1) + work * probe.dtype.itemsize


AT_A_NORMALISATION = 7
"""Times its output that a normalisation takes on the way back, counted in a residual network: what arrives by two
branches, what is handed on, and copies of both, centred, and their product."""


def members_of(treated: Sequence[TreatedLayer], shared: dict[str, str]) -> dict[tuple[str, ...], list[TreatedLayer]]:
    """Group the layers that share one A."""
    members: dict[str, list[TreatedLayer]] = {}
    for layer in treated:
        members.setdefault(shared.get(layer.name, layer.name), []).append(layer)
    return {tuple(layer.name for layer in group): group for group in members.values()}


def group_bytes(
    probe: Probe,
    device: torch.device,
    varied: Collection | None = None,
) -> dict[tuple[str, ...], int]:
    """Return the bytes of the sums and gradient rows of each group of layers that stay together, where the sums are."""
    return {
        names: sum(
            _summed_bytes(layer, probe, probe.dtype.itemsize, follows=layer.name in probe.shared)
            + (0 if varied is None else _varied_bytes(layer, probe, varied, follows=layer.name in probe.shared))
            + (0 if _elsewhere(layer, probe, device) else _row_bytes(layer, probe))
            for layer in group
        )
        for names, group in members_of(probe.layers, probe.shared).items()
    }


def _summed_bytes(layer: TreatedLayer, probe: Probe, item: int, *, follows: bool) -> int:
    sides = probe.sides(layer, follows=follows)
    return item * layer.groups * sum(side * side if dense else side for side, dense in sides)


def _varied_bytes(layer: TreatedLayer, probe: Probe, collection: Collection, *, follows: bool) -> int:
    """Bytes of the sums that the variance over batches sets aside."""
    if not collection.batch_variance:
        return 0
    gradient, *activation = sides_of(layer, follows=follows)
    sides = activation if activation_refusal(layer) is None else []
    if gradient_refusal(layer, probe.kept(layer).kind, collection.fisher) is None:
        sides.append(gradient)
    return probe.dtype.itemsize * layer.groups * sum(side * side if dense else side for side, dense in sides)


def _row_bytes(layer: TreatedLayer, probe: Probe) -> int:
    kept = probe.kept(layer)
    return 0 if kept.kind == "dense" else kept.share_bytes(layer)


def _elsewhere(layer: TreatedLayer, probe: Probe, device: torch.device) -> bool:
    """Whether its gradient rows stand on the host though the device computes."""
    return device.type == "cuda" and probe.kept(layer).on_host


def kept_terms(
    workspace: Workspace,
    probe: Probe,
    *,
    offload: bool,
    several: bool,
) -> list[Term]:
    """Return the terms of gradient rows on the host and of factors that are not spilled."""
    terms: list[Term] = []
    apart = sum(
        _row_bytes(layer, probe) for layer in probe.layers if _elsewhere(layer, probe, workspace.machine.device)
    )
    if apart:
        terms.append(Term("gradient rows", "Σ T · out", apart, "host"))
    if several:
        return terms
    item = 8 if workspace.options.collection.dtype == "float64" else 4
    storage = workspace.options.collection.storage_dtype
    width = item if storage is None else getattr(torch, storage).itemsize
    # rows that stand on the host stay where they are
    stored = sum(_row_bytes(layer, probe) for layer in probe.layers) - apart
    stored += sum(_summed_bytes(layer, probe, width, follows=layer.name in probe.shared) for layer in probe.layers)
    # on the host they take the place of the sums, a layer at a time
    when: Stage = "decomposition" if offload or workspace.machine.device.type != "cuda" else "throughout"
    terms.append(Term("factors", "Σ in² + Σ out²", stored, "host", when))
    return terms


def row_sizes(probe: Probe, *, on_device: bool) -> list[tuple[str, str, int, Source, Stage]]:
    """Return the further bytes of gradient rows: Gram matrices, bases and merged rows.

    Name, formula, bytes, source and stage of each; nothing where every G is dense. With ``on_device`` a device
    decomposes the Gram matrices.
    """
    kept = [(layer, probe.kept(layer)) for layer in probe.layers if probe.kept(layer).kind != "dense"]
    if not kept:
        return []
    gram = max(
        (
            gram_bytes(rows, layer.out_dim, on_device=on_device and each.kind == "woodbury")
            for layer, each in kept
            if (rows := each.gram_rows(layer.out_dim))
        ),
        default=0,
    )
    matrices = 6 if on_device else 4
    basis = max(basis_bytes(each.rows, layer.out_dim) if each.basis else 0 for layer, each in kept)
    # a triangle and as many rows again are made one: they, and the factorisation's copy
    merged = max((4 * layer.out_dim**2 for layer, each in kept if each.rows > layer.out_dim), default=0)
    return [
        (
            "Gram matrix",
            f"{matrices} · T² · 8, and chunks of 2²¹ numbers, most gradient rows",
            gram,
            "exact",
            "decomposition",
        ),
        ("basis of gradient rows", "T · n · 8, widest layer", basis, "exact", "decomposition"),
        ("merged gradient rows", "2 · 2n · n, widest layer", merged * probe.dtype.itemsize, "exact", "collection"),
    ]


def example_gradients(treated: Sequence[TreatedLayer], examples: int) -> int:
    """Return how many numbers the gradients of bare parameters by example hold, with what waits for them."""
    bare = [layer for layer in treated if isinstance(layer, BareLayer)]
    # what arrives, and its sum over all uses
    copied = 2 * examples * sum(layer.out_dim for layer in bare if layer.held is None)
    again = sum(layer.out_dim for layer in bare if layer.held is not None)
    # of some examples: those with respect to what was made of the parameters, and pulled back to them, and one more
    made = 3 * examples_at_once(examples, again) * again
    return copied + made + examples * sum(layer.held or 0 for layer in bare)


class LoadedSide(NamedTuple):
    """One factor of a layer as it is loaded."""

    name: Literal["A", "G"]
    size: int
    kind: Literal["dense", "rows", "diagonal"]
    own: bool
    """Decomposed for this layer, and not for one that it shares its A with."""


def read_back_bytes(layer: TreatedLayer, probe: Probe, kept: torch.dtype) -> int:
    """Return the bytes of the factors of one part of a layer as they are read back."""
    size = probe.held_bytes(layer) // layer.groups
    # a layer that follows has a copy of the A that it shares
    for side in loaded_sides(layer, probe, follows=False):
        size += kept.itemsize * {"dense": side.size**2, "diagonal": side.size, "rows": 0}[side.kind]
    return size


def loaded_sides(layer: TreatedLayer, probe: Probe, *, follows: bool) -> tuple[LoadedSide, ...]:
    """G and, where there is one, A."""
    dense = layer.form != "diagonal_block"
    rows = dense and probe.kept(layer).kind != "dense"
    sides = [LoadedSide("G", layer.out_dim, "rows" if rows else "dense" if dense else "diagonal", own=True)]
    if layer.form not in ("block", "diagonal_block"):
        sides.append(
            LoadedSide("A", layer.in_dim, "dense" if layer.form == "kronecker" else "diagonal", own=not follows)
        )
    return tuple(sides)
