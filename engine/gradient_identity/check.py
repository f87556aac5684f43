"""The check of one batch: three identities of every layer's rows, each against the example alone.

With the layer inputs ``a`` and output gradients ``g`` that hooks recorded of a batch of different
examples, and a fixed cotangent ``v``, for each checked example n:

=============  =========================================================================================
repetition     the batch run again, the generator elsewhere, gives the same rows: the model draws nothing
independence   the rows of n in the batch are those of n alone: examples do not mix, and are in order
completeness   ``Σ_t g_nt a_ntᵀ`` is the gradient of ``⟨v_n, f(x_n)⟩`` by plain autograd, without hooks
=============  =========================================================================================

Differences are relative to ``‖∇_W ℓ_n‖ + ε Σ_t ‖g_nt‖ ‖a_nt‖`` with ``ε = 100 · eps / tolerance``,
since gradients of parts may cancel (the bias of attention's keys has none at all). What exceeds the
tolerance in float32 or less is computed again in float64, which decides. There, rounding is
measured: by the same example in a batch of copies of itself.

A model that draws random numbers is held to one forward pass: completeness of the whole batch, with
the generator in the same state. So is a batch whose examples cannot be run alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.gradient_identity.checked_model import NARROW_TOLERANCE, TOLERANCES, Subject
from engine.gradient_identity.comparison import Errors, compare_rows, is_finite, relative
from engine.gradient_identity.completeness import completeness
from engine.gradient_identity.gradients import LayerRows
from engine.gradient_identity.recorded_rows import Recording, record
from engine.gradient_identity.reference import Objective, narrowest_dtype
from engine.layers.layer import TreatedLayer
from engine.memory.out_of_memory import lost_device, ran_out_of_memory
from engine.model.batches import Batch, map_tensors

Proof = str
"""`alone`, `single` (batches of one example), `inputs` (no gradients), or `same_forward`."""
_RAISED = 10.0
"""Times that measured rounding may raise the tolerance."""


@dataclass(frozen=True, kw_only=True)
class LayerCheck:
    """The result of a check of one layer."""

    error: float
    """The largest relative difference."""
    identity: str
    """The identity that it is of: `completeness` or `independence`."""
    examples: int
    """Examples held against themselves alone."""
    proof: Proof
    """The gradients that the rows were compared with."""
    failed: bool
    mixes: bool = False
    """The model's outputs for one example depend on the others."""
    is_unordered: bool = False
    """Sums over all rows are right, but whose each row is cannot be said."""

    @property
    def why(self) -> str:
        """The identity that failed, for a layer that is not covered."""
        against = "each example alone" if self.proof != "same_forward" else "plain autograd in the same forward pass"
        if self.proof == "same_forward" and self.identity == "independence":
            against = "each example's own beside other examples"
        mixing = "; what the model returns for one example depends on the others" if self.mixes else ""
        return f"its rows differ from {against} by {self.error:.2g} ({self.identity} of the gradient identity){mixing}"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a check of one batch."""

    layers: dict[str, LayerCheck]
    draws: frozenset[str]
    """Layers whose rows change from one run to the next."""
    unseen: frozenset[str]
    """Names of parameters, covered by no layer, whose gradient is not zero."""


@dataclass
class BatchCheck:
    """Checks some layers on one batch."""

    subject: Subject
    layers: Sequence[TreatedLayer]
    batch: Batch
    """A few different examples."""
    examples: Sequence[int]
    """Places in ``batch`` of those that are held against themselves alone."""
    seed: int
    drawing: frozenset[str] = frozenset()
    """Layers that are known to draw; taken as given where ``repeats`` is not set."""
    repeats: bool = True
    """Run the batch twice."""
    others: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that no layer covers, whose gradients are looked at too."""
    has_room: Callable[[], bool] = lambda: True
    """Whether there is memory for the model in float64."""

    def run(self) -> Checked:
        """Check all layers.

        Returns:
            The check of each layer whose rows are finite, and what was found of the model besides.

        Raises:
            EngineError: If the model refuses the whole batch.
        """
        draws, mixes, proof, errors, unseen = self._errors(self.subject, self.layers)
        tolerance = self.subject.tolerance
        checked = [layer for layer in self.layers if layer.name in errors]
        suspects = [layer for layer in checked if errors[layer.name].largest[0] > tolerance]
        if suspects and not self.subject.is_exact:
            decided = self._decided_exactly(suspects)
            if decided is not None:
                return self._merged(errors, decided, draws, proof, tolerance, unseen)
        allowed = dict.fromkeys(errors, tolerance)
        if suspects:
            allowed |= self._allowed(suspects, tolerance)
        return Checked(
            layers={
                name: self._found(found, proof[name], allowed[name], mixes=mixes) for name, found in errors.items()
            },
            draws=draws,
            unseen=unseen,
        )

    # ---- what decides

    def _decided_exactly(self, suspects: Sequence[TreatedLayer]) -> Checked | None:
        """The same check of ``suspects`` in float64; None where that cannot be had."""
        if not self.has_room():
            return None
        try:
            with self.subject.widened() as wide:
                return replace(self, subject=wide, layers=suspects, others={}).run()
        except (EngineError, RuntimeError, TypeError) as error:
            if ran_out_of_memory(error) or lost_device(error):
                raise
            # a model that names its precision cannot be widened
            return None

    def _merged(
        self,
        errors: Mapping[str, Errors],
        decided: Checked,
        draws: frozenset[str],
        proof: Mapping[str, Proof],
        tolerance: float,
        unseen: frozenset[str],
    ) -> Checked:
        certain = {
            name: self._found(found, proof[name], tolerance, mixes=False)
            for name, found in errors.items()
            if name not in decided.layers
        }
        return Checked(layers=certain | decided.layers, draws=draws | decided.draws, unseen=unseen)

    def _found(self, errors: Errors, proof: Proof, allowed: float, *, mixes: bool) -> LayerCheck:
        error, identity = errors.largest
        failed = not error <= allowed
        return LayerCheck(
            error=error,
            identity=identity,
            examples=len(self.examples) if proof != "same_forward" else 0,
            proof=proof,
            failed=failed,
            mixes=failed and mixes,
        )

    def _allowed(self, suspects: Sequence[TreatedLayer], tolerance: float) -> dict[str, float]:
        """The tolerance of each of ``suspects``, raised by the rounding of an example among copies of itself."""
        allowed = {}
        example = self.examples[0]
        inside = narrowest_dtype(self.subject, self.batch)
        tolerance = max(tolerance, TOLERANCES.get(inside, NARROW_TOLERANCE))
        copies = pick_examples(self.batch, [example] * self.batch.size)
        alone = replace(self, batch=pick_examples(self.batch, [example]), examples=[0])
        errors = {layer.name: Errors() for layer in suspects}
        try:
            many = record(self.subject, suspects, copies, self.seed)
            cotangent = None if many.cotangent is None else many.cotangent[:1]
            one = record(self.subject, suspects, alone.batch, self.seed, cotangent)
        except EngineError:
            return dict.fromkeys((layer.name for layer in suspects), tolerance)
        for layer in suspects:
            compare_rows(errors[layer.name], many.rows(layer.name, 0), one.rows(layer.name, 0), floor=0.0)
            measured = errors[layer.name].independence
            allowed[layer.name] = min(_RAISED * tolerance, max(tolerance, 2 * measured))
        return allowed

    # ---- the identities

    def _errors(
        self, subject: Subject, layers: Sequence[TreatedLayer]
    ) -> tuple[frozenset[str], bool, dict[str, Proof], dict[str, Errors], frozenset[str]]:
        together = record(subject, layers, self.batch, self.seed)
        # what a hook has refused already stands with its own reason
        layers = [layer for layer in layers if together.layers[layer.name].flaw is None]
        names = [layer.name for layer in layers]
        if not is_finite(together):
            # the pass says which layer's, and what to do
            return frozenset(), False, {}, {}, frozenset()
        draws = self._drawing(together) if self.repeats else self.drawing & set(names)
        errors = {name: Errors() for name in names}
        proof: dict[str, Proof] = dict.fromkeys(names, "alone" if subject.has_gradients else "inputs")
        unseen: set[str] = set()
        mixes = False
        if self.batch.size == 1:
            proof = dict.fromkeys(names, "single")
        # where rows have an order of their own, nothing is said of single examples
        apart = draws | subject.orders.unordered_among(layers)
        bound = [layer for layer in layers if layer.name not in apart]
        try:
            for example in self.examples if bound else ():
                mixes |= self._alone(subject, bound, together, example, errors, unseen)
        except EngineError:
            if self.batch.size == 1:
                raise
            # examples that cannot be run alone: packed ones, or the nodes of one graph
            beside, bound, unseen = bound, [], set()
            errors = {name: Errors() for name in names}
            mixes = self._beside_others(subject, beside, together, errors)
        rest = [layer for layer in layers if layer not in bound]
        if rest:
            proof |= dict.fromkeys((layer.name for layer in rest), "same_forward")
            self._same_forward(subject, rest, together, errors, unseen)
        return draws, mixes, proof, errors, frozenset(unseen)

    def _drawing(self, together: Recording) -> frozenset[str]:
        """Layers whose rows are others when the batch is run again with the generator elsewhere."""
        layers = [recorder.layer for recorder in together.layers.values() if recorder.flaw is None]
        again = record(self.subject, layers, self.batch, self.seed + 1, together.cotangent)
        drawn = set()
        for name in again.layers:
            differing = Errors()
            for example in range(self.batch.size):
                compare_rows(differing, together.rows(name, example), again.rows(name, example), floor=0.0)
            if not differing.independence <= self.subject.tolerance:
                drawn.add(name)
        return frozenset(drawn)

    def _alone(
        self,
        subject: Subject,
        layers: Sequence[TreatedLayer],
        together: Recording,
        example: int,
        errors: dict[str, Errors],
        unseen: set[str],
    ) -> bool:
        """Hold one example's rows against the example alone; whether its outputs depend on the others."""
        batch = pick_examples(self.batch, [example])
        cotangent = None if together.cotangent is None else _own(together.cotangent, example, self.batch.size)
        one = record(subject, layers, batch, self.seed, cotangent)
        own = _own(together.outputs, example, self.batch.size)
        if own.shape != one.outputs.shape:
            raise EngineError("the outputs of one example have another shape alone")
        mixes = self.subject.task.likelihood != "model" and (
            relative(own - one.outputs, one.outputs) > subject.tolerance
        )
        if not subject.has_gradients or together.cotangent is None:
            for layer in layers:
                here, alone = together.rows(layer.name, example), one.rows(layer.name, 0)
                compare_rows(errors[layer.name], here, alone, floor=0.0)
            return mixes
        rows = {layer.name: LayerRows(recorder=together.layers[layer.name], example=example) for layer in layers}
        norm = self._complete(subject, rows, batch, one.cotangent, errors, unseen)
        # gradients that are nothing but rounding beside the model's largest
        floor = subject.negligible(norm) / subject.tolerance
        for layer in layers:
            compare_rows(errors[layer.name], together.rows(layer.name, example), one.rows(layer.name, 0), floor=floor)
        return mixes

    def _beside_others(
        self, subject: Subject, layers: Sequence[TreatedLayer], together: Recording, errors: dict[str, Errors]
    ) -> bool:
        """Hold the rows of examples that cannot be run alone against theirs beside others; whether outputs differ."""
        mixes, count = False, self.batch.size
        # gradients that are nothing but rounding beside the largest
        sizes = [float(row.abs().max()) for name in errors for row in together.rows(name, 0).gradients() if len(row)]
        floor = subject.negligible(max(sizes, default=0.0)) / subject.tolerance
        for example in self.examples:
            other = example if count == 2 else (example + 1) % count
            places = [example if place == example else other for place in range(count)]
            try:
                beside = record(subject, layers, pick_examples(self.batch, places), self.seed, together.cotangent)
            except EngineError:
                return mixes
            own, theirs = (_own(each.outputs, example, count) for each in (together, beside))
            if own.shape != theirs.shape:
                return mixes
            mixes |= subject.task.likelihood != "model" and relative(theirs - own, own) > subject.tolerance
            for layer in layers:
                here, there = together.rows(layer.name, example), beside.rows(layer.name, example)
                compare_rows(errors[layer.name], here, there, floor=floor)
        return mixes

    def _same_forward(
        self,
        subject: Subject,
        layers: Sequence[TreatedLayer],
        together: Recording,
        errors: dict[str, Errors],
        unseen: set[str],
    ) -> None:
        """Hold the sum of all rows against the whole batch, the generator in the same state."""
        if together.cotangent is None:
            return
        rows = {layer.name: LayerRows(recorder=together.layers[layer.name], example=None) for layer in layers}
        self._complete(subject, rows, self.batch, together.cotangent, errors, unseen)

    def _complete(
        self,
        subject: Subject,
        rows: Mapping[str, LayerRows],
        batch: Batch,
        cotangent: Tensor | None,
        errors: dict[str, Errors],
        unseen: set[str],
    ) -> float:
        """Note how far ``rows`` are from plain gradients; returns the norm of the largest layer's."""
        if cotangent is None:
            return 0.0
        objective = Objective(batch=batch, seed=self.seed, cotangent=cotangent)
        found = completeness(subject, rows, self.others, objective)
        for name, error in found.errors.items():
            errors[name].raise_to("completeness", error)
        unseen |= found.unseen
        return found.largest_norm


def _own(tensor: Tensor, example: int, examples: int) -> Tensor:
    """One example's part; a loss of the model's own is of all."""
    return tensor[example : example + 1] if tensor.shape[0] == examples else tensor


def pick_examples(batch: Batch, places: Sequence[int]) -> Batch:
    """Pick examples of a batch.

    Args:
        batch: The batch.
        places: Places of the examples, in the order wanted; one may come more than once.

    Returns:
        A batch of copies of those examples.
    """
    index = torch.tensor(places, device=batch.index.device)

    def pick(tensor: Tensor) -> Tensor:
        return tensor[index.to(tensor.device)]

    return Batch(
        inputs=map_tensors(batch.inputs, pick), targets=map_tensors(batch.targets, pick), index=pick(batch.index)
    )
