"""The probe: what a forward pass of one example, repeated, shows of a model before anything large is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from engine.collection.pass_job import PassJob
from engine.collection.subsamples import Sizes
from engine.factors.representation import DENSE, Representation
from engine.layers.coverage import Survey
from engine.layers.layer import TreatedLayer
from engine.layers.tied import TiedHeadLayer
from engine.memory.plan import Chosen
from engine.model.activation_memory import Saved
from engine.row_layout.layer_calls import Call


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
    repeated: bool = False
    """A direction is pulled back again until all its gradients are finite, for which they wait for each other."""
    resident_bytes: int | None = None
    """Bytes that the process holds without the plan's own needs; None takes those that it holds now."""
    forward: TimedForward | None = None
    """The last forward pass of very few examples; None where none was timed."""
    representations: Mapping[str, Representation] = field(default_factory=dict)
    """How the layers keep their G; dense where a layer is not named."""

    def kept(self, layer: TreatedLayer) -> Representation:
        """Return how one layer keeps its G.

        Returns:
            Its representation; dense where the probe names none.
        """
        return self.representations.get(layer.name, DENSE)

    def sides(self, layer: TreatedLayer, *, follows: bool) -> list[tuple[int, bool]]:
        """Return the factors that a layer sums itself.

        Args:
            follows: Whether the layer shares the A of another, and sums none.

        Returns:
            Rows of each factor, and whether it is dense; a G that is kept as rows is left out.
        """
        every = sides_of(layer, follows=follows)
        return every if self.kept(layer).kind == "dense" else every[1:]


@dataclass(frozen=True, kw_only=True)
class ProbedModel:
    """A model after its probe: how passes run it, which of its layers they collect, and how large those are."""

    job: PassJob
    """The model, and how passes run it, with the row layout that the probe found."""
    survey: Survey
    """The layers to be collected, and those that are not, with their reasons."""
    probe: Probe

    def with_probe(self, probe: Probe) -> "ProbedModel":
        """Replace the probe.

        Args:
            probe: The probe whose representations and head the passes take over.

        Returns:
            A copy of the probed model.
        """
        job = replace(self.job, representations=probe.representations, head=probe.head)
        return replace(self, job=job, probe=probe)

    def for_passes(self, chosen: Chosen, sizes: Sizes | None) -> "ProbedModel":
        """Take over what the plan has chosen for the passes.

        Args:
            chosen: The plan's choice: the slices, and the place of the sums.
            sizes: The sample sizes that the passes keep; None where they keep none.

        Returns:
            A copy of the probed model.
        """
        job = replace(self.job, micro_batch=chosen.micro_batch, offload=chosen.offload, sizes=sizes)
        return replace(self, job=job)

    def without_tensors(self) -> "ProbedModel":
        """Return the same without the tensors of the calls, which must not outlive the probe."""
        return replace(self, probe=replace(self.probe, calls=[]))


def sides_of(layer: TreatedLayer, *, follows: bool) -> list[tuple[int, bool]]:
    """Return the factors that a layer holds itself.

    Args:
        follows: Whether the layer shares the A of another, and holds none.

    Returns:
        Rows of each factor, and whether it is dense; G comes first.
    """
    sides = [(layer.out_dim, layer.form != "diagonal_block")]
    if not follows and layer.form not in ("block", "diagonal_block"):
        sides.append((layer.in_dim, layer.form == "kronecker"))
    if isinstance(layer, TiedHeadLayer):
        # beside the head's: counts of the table's ids, moments of its vectors, the head's own A and its G's diagonal
        sides += [(layer.fan_out, False), (layer.fan_in, True), (layer.in_dim, True), (layer.fan_out, False)]
    return sides
