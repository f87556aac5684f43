"""The check of one batch: three identities of every layer's rows, each against the example alone.

With the layer inputs ``a`` and output gradients ``g`` that hooks recorded of a batch of different examples, and a
fixed cotangent ``v``, for each checked example n:

=============  =========================================================================================
repetition     the batch run again, the generator elsewhere, gives the same rows: the model draws nothing
independence   the rows of n in the batch are those of n alone: examples do not mix, and are in order
completeness   ``Σ_t g_nt a_ntᵀ`` is the gradient of ``⟨v_n, f(x_n)⟩`` by plain autograd, without hooks
=============  =========================================================================================

Differences are relative to ``‖∇_W ℓ_n‖ + ε Σ_t ‖g_nt‖ ‖a_nt‖`` with ``ε = 100 · eps / tolerance``, since gradients of
parts may cancel (the bias of attention's keys has none at all). What exceeds the tolerance in float32 or less is
computed again in float64, which decides. There, rounding is measured, by one example among copies of itself.

A model that draws random numbers is held to one forward pass: completeness of the whole batch, with the generator in
the same state. So is a batch whose examples cannot be run alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.gradient_identity.checked_model import NARROW_TOLERANCE, TOLERANCES, Forward, Subject, record
from engine.gradient_identity.completeness import LayerRows, completeness
from engine.gradient_identity.findings import Allowance, Checked, Findings, LayerCheck
from engine.gradient_identity.recorded_rows import Errors, Recording, compare_rows, is_finite, relative
from engine.gradient_identity.reference import Objective, narrowest_dtype
from engine.gradient_identity.schedule import pick_examples
from engine.layers.layer import TreatedLayer
from engine.memory.out_of_memory import first_line, lost_device, ran_out_of_memory
from engine.model.state.generators import Generators

_RAISED = 10.0
"""Times that measured rounding may raise the tolerance."""
_STATES = 4
"""Generator states from which a batch that differs is run, before it is taken to draw nothing."""


@dataclass
class BatchCheck:
    """Checks some layers on examples that go through the model together."""

    subject: Subject
    layers: Sequence[TreatedLayer]
    forward: Forward
    """All of these examples, and the state of torch's generators that their forward pass began with."""
    examples: Sequence[int]
    """Places of those that are held against themselves alone."""
    summed: Recording | None = None
    """The rows of ``examples`` as a pass has handed them to its sums; None records them here."""
    drawing: frozenset[str] = frozenset()
    """Layers that are known to draw."""
    drawn_outputs: bool = False
    """The outputs are known to change from one run to the next."""
    others: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that no layer covers, whose gradients are looked at too."""
    has_room: Callable[[], bool] = lambda: True
    """Whether there is memory for the model in float64."""
    explained: bool = False
    """That outputs depend on other examples stands with the layers that it is due to."""
    floor: float = 0.0
    """Norm of the model's largest gradient, as far as it is known from elsewhere."""

    def run(self) -> Checked:
        """Check all layers."""
        findings = self._findings(self.subject, self.layers)
        tolerance = self.subject.tolerance
        suspects = findings.suspects(self.layers, tolerance, outputs=self._outputs_decide)
        if not suspects:
            return self._judged(findings, Allowance(dict.fromkeys(findings.errors, tolerance), tolerance))
        decided, reason = self._decided_widely(suspects, findings)
        if decided is None:
            return self._judged(findings, self._allowed(suspects, findings, reason))
        names = [name for name in findings.errors if name not in decided.layers]
        certain = self._judged(findings.of(names), Allowance(dict.fromkeys(names, tolerance), tolerance))
        return replace(
            certain,
            layers=certain.layers | decided.layers,
            draws=findings.draws | decided.draws,
            largest_norm=max(findings.largest_norm, decided.largest_norm),
        )

    @property
    def _outputs_decide(self) -> bool:
        """Whether outputs that depend on other examples refuse layers: the gradients of losses follow them."""
        return self.subject.has_gradients and not self.explained

    # ---- what decides

    def _decided_widely(self, suspects: Sequence[TreatedLayer], findings: Findings) -> tuple[Checked | None, str]:
        """The same check of ``suspects`` in float64 throughout; None with the reason where that cannot be had."""
        subject = self.subject
        if subject.widens or (subject.is_exact and narrowest_dtype(subject, self.forward.batch) == torch.float64):
            return None, ""
        if not self.has_room():
            return None, "there was no memory for the model in float64"
        said = ""
        for widens in (True, False):
            if subject.is_exact and not widens:
                break
            try:
                with subject.widened(widens=widens) as wide:
                    floor = max(self.floor, findings.largest_norm)
                    whole = replace(self, subject=wide, layers=suspects, others={}, floor=floor, summed=None)
                    return replace(whole, drawing=findings.draws).run(), ""
            except (EngineError, RuntimeError, TypeError) as error:
                if lost_device(error):
                    raise
                if ran_out_of_memory(error):
                    return None, "there was no memory for the batch in float64"
                # a model that names its precision, or a kernel that knows no other
                said = said or first_line(error)
        return None, f"the model could not be run in float64 ({said})"

    def _judged(self, findings: Findings, allowance: Allowance) -> Checked:
        directed = not findings.directions <= allowance.outputs
        mixes = directed or not findings.mixing <= allowance.outputs
        exact = TOLERANCES[torch.float64]
        broken = {name for name, each in findings.errors.items() if not each.largest[0] <= allowance.layers[name]}
        # where rows show the mixing, layers whose rows do not are on no path
        # through it, unless what is pulled back of their examples is another one
        alone = directed or (mixes and self._outputs_decide and not broken)
        layers = {}
        for name, errors in findings.errors.items():
            error, identity = errors.largest
            allowed, proof = allowance.layers[name], findings.proof[name]
            by_outputs = alone and name not in (findings.idle | broken)
            if by_outputs:
                error, identity = max(findings.directions, findings.mixing), "outputs"
            identity = identity if findings.repeats else "repetition"
            failed = by_outputs or name in broken
            loosened = name in allowance.decided and allowed > exact
            layers[name] = LayerCheck(
                error=error,
                identity=identity,
                examples=len(self.examples) if proof != "same_forward" else 0,
                proof=proof,
                failed=failed,
                mixes=failed and mixes,
                tolerance=allowed if loosened else None,
                tolerance_reason=allowance.reason if loosened else None,
            )
        return Checked(
            layers=layers,
            draws=findings.draws,
            unseen=frozenset(findings.unseen),
            largest_norm=findings.largest_norm,
        )

    def _allowed(self, suspects: Sequence[TreatedLayer], findings: Findings, reason: str) -> Allowance:
        """The tolerance of each of ``suspects``, raised by the rounding of an example among copies of itself."""
        narrowest = narrowest_dtype(self.subject, self.forward.batch)
        tolerance = max(self.subject.tolerance, TOLERANCES.get(narrowest, NARROW_TOLERANCE))
        if tolerance > TOLERANCES[torch.float64] and not reason:
            reason = f"an operation of the model returns {str(narrowest).removeprefix('torch.')} whatever it is given"
        rounding, outputs = self._rounding(suspects, findings)
        most = _RAISED * tolerance
        allowed = {name: min(most, max(tolerance, 2 * measured)) for name, measured in rounding.items()}
        # the others are held to the tolerance that they have kept
        return Allowance(
            layers=dict.fromkeys(findings.errors, self.subject.tolerance) | allowed,
            decided=frozenset(allowed),
            outputs=min(most, max(tolerance, 2 * outputs)),
            reason=reason or "one example among copies of itself is rounded otherwise than alone",
        )

    def _rounding(self, suspects: Sequence[TreatedLayer], findings: Findings) -> tuple[dict[str, float], float]:
        """How far an example among copies of itself is from the example alone: of each layer, and of the outputs."""
        example = self.examples[0]
        batch, start = self.forward.batch, self.forward.start
        copies = Forward(batch=pick_examples(batch, [example] * batch.size), start=start)
        single = Forward(batch=pick_examples(batch, [example]), start=start)
        errors = {layer.name: Errors() for layer in suspects}
        try:
            many = record(self.subject, suspects, copies, places=(0,))
            one = record(self.subject, suspects, single, None if many.cotangent is None else many.of(many.cotangent, 0))
        except EngineError:
            return dict.fromkeys(errors, 0.0), 0.0
        for layer in suspects if many.layers.keys() == one.layers.keys() == errors.keys() else ():
            compare_rows(errors[layer.name], many.rows(layer.name, 0), one.rows(layer.name, 0), floor=0.0)
        own = many.of(many.outputs, 0)
        comparable = findings.mixing and own.shape == one.outputs.shape
        outputs = relative(own - one.outputs, one.outputs) if comparable else 0.0
        return {name: each.independence for name, each in errors.items()}, outputs

    # ---- the identities

    def _findings(self, subject: Subject, layers: Sequence[TreatedLayer]) -> Findings:
        together = self.summed or record(subject, layers, self.forward, places=self.examples)
        # what a hook has refused already stands with its own reason
        layers = [layer for layer in layers if layer.name in together.layers]
        names = [layer.name for layer in layers]
        if not is_finite(together):
            # the pass says which layer's, and what to do
            return Findings()
        single = self.forward.batch.size == 1 == subject.collection.batch_size
        usual = "single" if single else "alone" if subject.has_gradients else "inputs"
        if together.cotangent is None:
            # nothing was pulled back: a batch without loss terms, or a head whose G comes from the outputs
            subject = subject.without_gradients()
            # outputs without a graph: no row was summed, and at the end of the pass the layer has no gradient
            layers = [layer for layer in layers if together.layers[layer.name].uses]
        findings = Findings(
            errors={name: Errors() for name in names},
            proof=dict.fromkeys(names, usual),
            draws=self.drawing & set(names),
            idle=frozenset(name for name in names if not together.layers[name].reached),
        )
        # where rows have an order of their own, nothing is said of single examples
        unordered = subject.layout.orders.unordered_among(layers)
        bound = [layer for layer in layers if layer.name not in findings.draws | unordered]
        try:
            for number in range(len(self.examples)) if bound else ():
                self._alone(subject, bound, together, number, findings)
            drawn, drawn_outputs = self._drawing(subject, bound, together, findings)
        except EngineError:
            if self.forward.batch.size == 1:
                raise
            # examples that cannot be run alone: packed ones, or the nodes of one graph
            findings.forget(names)
            self._beside_others(subject, bound, together, findings)
            drawn, drawn_outputs = self._drawing(subject, bound, together, findings)
            bound = []
        if drawn or drawn_outputs:
            # the same rows, of layers that draw
            self.drawing, self.summed = self.drawing | drawn, together
            self.drawn_outputs |= drawn_outputs
            return self._findings(subject, layers)
        drawing = [layer for layer in layers if layer.name in findings.draws - unordered]
        if self.forward.batch.size > 1 and (drawing or self.drawn_outputs):
            # the generator in the same state
            self._beside_others(subject, drawing, together, findings, directed=True)
            if findings.suspects(drawing, subject.tolerance, outputs=self._outputs_decide):
                findings.repeats = not any(self._rerun(subject, layers, together, self.forward.start))
        rest = [layer for layer in layers if layer not in bound]
        if rest:
            findings.proof |= dict.fromkeys((layer.name for layer in rest), "same_forward")
            self._same_forward(subject, rest, together, findings)
        return findings

    @property
    def _elsewhere(self) -> int:
        """A state of the generators other than any pass begins with: rows that hang on it are drawn."""
        return self.subject.collection.seed + 0x5EED

    def _drawing(
        self, subject: Subject, layers: Sequence[TreatedLayer], together: Recording, findings: Findings
    ) -> tuple[frozenset[str], bool]:
        """Which of differing layers draw, and whether outputs do: by the batch run again, the generator elsewhere."""
        layers = findings.suspects(layers, subject.tolerance, outputs=self._outputs_decide)
        if not layers:
            return frozenset(), False
        drawn: set[str] = set()
        changed = False
        # a choice of few may be drawn alike from another state, for all the examples that are looked at
        for start in range(self._elsewhere, self._elsewhere + _STATES):
            differing, outputs = self._rerun(subject, layers, together, start)
            drawn |= differing
            changed |= outputs
            if len(drawn) == len(layers):
                break
        return frozenset(drawn), changed and not self.drawn_outputs

    def _rerun(
        self, subject: Subject, layers: Sequence[TreatedLayer], together: Recording, start: Generators | int
    ) -> tuple[set[str], bool]:
        """Run the batch again: which layers have other rows of the checked examples, and whether outputs are others."""
        again = record(subject, layers, replace(self.forward, start=start), places=self.examples)
        differing = {name: Errors() for name in again.layers}
        for name, errors in differing.items():
            for number in range(len(self.examples)):
                compare_rows(errors, together.rows(name, number), again.rows(name, number), floor=0.0)
        own, others = (each.of(each.outputs, 0) for each in (together, again))
        changed = own.shape == others.shape and relative(own - others, own) > subject.tolerance
        return {name for name, errors in differing.items() if not errors.independence <= subject.tolerance}, changed

    def _alone(
        self,
        subject: Subject,
        layers: Sequence[TreatedLayer],
        together: Recording,
        number: int,
        findings: Findings,
    ) -> None:
        """Hold one example's rows and outputs against the example alone, the generator elsewhere."""
        batch = pick_examples(self.forward.batch, [self.examples[number]])
        alone = Forward(batch=batch, start=self._elsewhere)
        cotangent = None if together.cotangent is None else together.of(together.cotangent, number)
        one = record(subject, layers, alone, cotangent)
        own = together.of(together.outputs, number)
        if own.shape != one.outputs.shape or one.layers.keys() != {layer.name for layer in layers}:
            raise EngineError("one example alone has other outputs, or other rows")
        if not self.drawn_outputs and not findings.draws:
            self._compare_outputs(findings, own, one.outputs)
            self._compare_directions(findings, cotangent, one.direction)
        errors = findings.errors
        # inputs that are nothing but rounding beside the example's largest, as a difference of equal rows
        least = subject.negligible(one.largest_input()) / subject.tolerance if subject.is_exact else 0.0
        if not subject.has_gradients or together.cotangent is None:
            for layer in layers:
                here, there = together.rows(layer.name, number), one.rows(layer.name, 0)
                compare_rows(errors[layer.name], here, there, floor=0.0, floor_of_inputs=least)
            return
        rows = {layer.name: LayerRows(recorder=together.layers[layer.name], example=number) for layer in layers}
        norm = self._complete(subject, rows, alone, one.cotangent, findings)
        # gradients that are nothing but rounding beside the model's largest
        floor = subject.negligible(norm) / subject.tolerance
        for layer in layers:
            here, there = together.rows(layer.name, number), one.rows(layer.name, 0)
            compare_rows(errors[layer.name], here, there, floor=floor, floor_of_inputs=least)

    def _compare_outputs(self, findings: Findings, own: Tensor, plain: Tensor) -> None:
        """Note how far an example's outputs beside others are from those in another run; a loss is of all examples."""
        if self.subject.task.likelihood != "model":
            findings.mixing = max(findings.mixing, relative(own - plain, plain))
        if self.subject.curves_with_outputs:
            findings.directions = max(findings.directions, findings.mixing)

    def _compare_directions(self, findings: Findings, own: Tensor | None, plain: Tensor | None) -> None:
        """Note how far what is pulled back of an example is from what its loss asks for in another run."""
        if own is not None and plain is not None:
            findings.directions = max(findings.directions, relative(own - plain, plain))

    def _beside_others(
        self,
        subject: Subject,
        layers: Sequence[TreatedLayer],
        together: Recording,
        findings: Findings,
        *,
        directed: bool = False,
    ) -> None:
        """Hold the rows and outputs of examples against theirs beside others, in a batch of the same shape."""
        batch, count = self.forward.batch, self.forward.batch.size
        # gradients that are nothing but rounding beside the largest
        recordings = [together.rows(name, 0) for name in findings.errors]
        sizes = [float(row.abs().max()) for each in recordings for row in each.gradients() if row.numel()]
        floor = subject.negligible(max(sizes, default=0.0)) / subject.tolerance
        cotangent = self._whole_cotangent(subject, layers, together)
        for number, example in enumerate(self.examples):
            other = (example + 1) % count
            # all others are exchanged, the next one too
            places = [example if place in (example, other) else other for place in range(count)]
            exchanged = replace(self.forward, batch=pick_examples(batch, places))
            try:
                beside = record(subject, layers, exchanged, cotangent, [example])
            except EngineError:
                return
            own, theirs = together.of(together.outputs, number), beside.of(beside.outputs, 0)
            if own.shape != theirs.shape or not {layer.name for layer in layers} <= beside.layers.keys():
                return
            self._compare_outputs(findings, theirs, own)
            if directed and beside.direction is not None and together.cotangent is not None:
                mine = together.of(together.cotangent, number)
                self._compare_directions(findings, mine, beside.of(beside.direction, 0))
            for layer in layers:
                here, there = together.rows(layer.name, number), beside.rows(layer.name, 0)
                compare_rows(findings.errors[layer.name], here, there, floor=floor)

    def _whole_cotangent(self, subject: Subject, layers: Sequence[TreatedLayer], together: Recording) -> Tensor | None:
        """Return the collection's cotangent of all these examples; a pass has kept that of the checked ones alone."""
        if together.places is not None or together.cotangent is None:
            return together.cotangent
        return record(subject, layers, self.forward, places=self.examples).cotangent

    def _same_forward(
        self, subject: Subject, layers: Sequence[TreatedLayer], together: Recording, findings: Findings
    ) -> None:
        """Hold the sum of all rows against the whole batch, the generator in the same state."""
        whole = record(subject, layers, self.forward)
        for layer in layers:
            # what is summed is what is held against plain autograd here
            for number, example in enumerate(self.examples):
                here, there = together.rows(layer.name, number), whole.rows(layer.name, example)
                compare_rows(findings.errors[layer.name], here, there, floor=0.0)
        rows = {layer.name: LayerRows(recorder=whole.layers[layer.name], example=None) for layer in layers}
        self._complete(subject, rows, self.forward, whole.cotangent, findings)

    def _complete(
        self,
        subject: Subject,
        rows: Mapping[str, LayerRows],
        forward: Forward,
        cotangent: Tensor | None,
        findings: Findings,
    ) -> float:
        """Note how far ``rows`` are from plain gradients; returns the norm of the model's largest layer's."""
        if cotangent is None:
            return self.floor
        objective = Objective(forward=forward, cotangent=cotangent)
        compared = completeness(subject, rows, self.others, objective, floor=self.floor)
        for name, error in compared.errors.items():
            findings.errors[name].raise_to("completeness", error)
        findings.unseen |= compared.unseen
        findings.largest_norm = max(findings.largest_norm, compared.largest_norm)
        return compared.largest_norm
