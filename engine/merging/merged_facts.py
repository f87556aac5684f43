"""Merged facts: what is known of one layer over the examples of several sets, from what each set knows of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from engine.errors import NotMergeable
from engine.factors.factor_set import LayerFacts, LayerSums, VarianceSums
from engine.linalg.linear_operator import Structured
from engine.merging.estimates import exact_trace, joined_variance, missing_variance, relative_variance
from engine.merging.weighted_sides import Addend, MergedLayer, added

_ALIKE = ("module", "form", "parameters", "parameter_count", "in_dim", "out_dim", "bias", "sharing", "windows")
_RESIDUAL = re.compile(r"relative residual [^)]*")
_REASONS = re.compile(r"(?:A: (?P<A>.*?))?(?:; )?(?:G: (?P<G>.*))?")


def require_alike(addends: Sequence[Addend]) -> None:
    """Require that all sets mean the same layer."""
    first = addends[0].facts
    for each in addends[1:]:
        differing = [name for name in _ALIKE if getattr(each.facts, name) != getattr(first, name)]
        if differing:
            name = differing[0]
            raise NotMergeable(
                f"layer `{first.name}`: `{name}` must be the same in all sets (got {getattr(first, name)!r} and "
                f"{getattr(each.facts, name)!r}); collect all of them from one model",
                layer=first.name,
            )


def merged_sums(addends: Sequence[Addend], idle: float) -> LayerSums:
    """Add the counts and sums of one layer."""
    every = [each.sums for each in addends]
    first, gradients = every[0], sum(sums.gradients for sums in every)
    if gradients and any(sums.unproven for sums in every):
        name = addends[0].facts.name
        raise NotMergeable(
            f"layer `{name}`: it has a gradient in some sets, and in others only inputs, which one collection over all "
            "examples would leave out; collect them undivided",
            layer=name,
        )
    traces = [sums.traces for sums in every if sums.gradients or sums.weight_G]
    whole = tuple(sum(column) for column in zip(*(each for each in traces if each is not None), strict=True))
    return replace(
        first,
        weight_A=sum(sums.weight_A for sums in every),
        weight_G=sum(sums.weight_G for sums in every) + idle,
        rows_A=sum(sums.rows_A for sums in every),
        rows_G=sum(sums.rows_G for sums in every),
        gradients=gradients,
        unproven=any(sums.unproven for sums in every),
        examples=sum(sums.examples for sums in every),
        traces=None if any(each is None for each in traces) or not whole else whole,
        variance_A=None,
        variance_G=None,
    )


def merged_facts(addends: Sequence[Addend], idle: float, made: MergedLayer | None, *, varied: bool) -> LayerFacts:
    """Return what is known of one layer over all examples; ordinal and sharing are the first set's."""
    require_alike(addends)
    facts, sums = [each.facts for each in addends], merged_sums(addends, idle)
    first = facts[0]
    trace = error = None
    if sums.traces is not None and sums.weight_G:
        trace, error = exact_trace(sums.traces, sums.weight_G, sums.examples)
    bounded = sums.tied is None
    worst = max(facts, key=lambda each: -1.0 if each.gradient_identity is None else each.gradient_identity)
    loosest = max(facts, key=lambda each: each.identity_tolerance or 0.0)
    checked = [each.examples_checked for each in facts if each.examples_checked is not None]
    kinds = {each.representation_G for each in facts}
    found = replace(
        first,
        positions=sum(each.positions for each in facts),
        terms=sum(each.terms for each in facts),
        calls=max(each.calls for each in facts),
        rank_bound_A=(sums.rows_A or None) if bounded and first.form == "kronecker" else None,
        rank_bound_G=(sums.rows_G or None) if bounded else None,
        exact_trace=trace,
        trace_standard_error=error,
        representation_G=first.representation_G if len(kinds) == 1 else "dense",
        rows_place="host" if len(kinds) == 1 and first.rows_place is not None else None,
        gradient_identity=worst.gradient_identity,
        checked_against=worst.checked_against,
        identity_tolerance=loosest.identity_tolerance,
        identity_tolerance_reason=loosest.identity_tolerance_reason,
        examples_checked=sum(checked) if checked else None,
        pieces=sum(each.pieces for each in facts),
        sums=sums,
    )
    if made is not None and made.tied is not None:
        found = replace(
            found,
            why=_RESIDUAL.sub(f"relative residual {made.residual:.2g}", found.why),
            sums=replace(sums, tied=made.tied),
        )
    return _with_variance(found, addends) if varied else found


@dataclass
class _Spread:
    """The variance of one side over the batches of all sets so far."""

    sums: VarianceSums | None = None
    total: Tensor | None = None
    """``Σ w A`` in float64."""
    weight: float = 0.0

    def add_(self, own: VarianceSums | None, factor: Tensor | Structured, weight: float) -> None:
        """Let one set's batches enter."""
        if own is None or isinstance(factor, Structured):
            return
        if self.sums is None or self.total is None:
            self.sums = own
        else:
            gap = 0.0
            if self.weight and weight:
                apart = factor.to(self.total.dtype, copy=True).sub_(self.total, alpha=1 / self.weight)
                gap = float(apart.square_().sum())
            self.sums = joined_variance(self.sums, own, (self.weight, weight), gap)
        self.total = added(self.total, factor, weight)
        self.weight += weight

    def relative(self) -> tuple[float | None, float | None]:
        """Variance and standard error, relative to the norm of the factor."""
        if self.sums is None or self.total is None or not self.weight:
            return None, None
        norm = float(self.total.square().sum()) / self.weight**2
        return relative_variance(self.sums, float(self.sums.batches), self.weight, norm)


def _with_variance(facts: LayerFacts, addends: Sequence[Addend]) -> LayerFacts:
    """The facts with the variance of A and G over all batches."""
    sides = {"A": _Spread(), "G": _Spread()}
    if any(each.sums.variance_A is not None or each.sums.variance_G is not None for each in addends):
        for each in addends:
            factors = each.load()
            sides["A"].add_(each.sums.variance_A, factors.A, each.sums.weight_A)
            sides["G"].add_(each.sums.variance_G, factors.G, each.sums.weight_G)
    matched = _REASONS.fullmatch(addends[0].facts.no_batch_variance or "")
    known = {} if matched is None else matched.groupdict()
    reasons = []
    for side, spread in sides.items():
        if spread.relative()[0] is None:
            why = known.get(side) if spread.sums is None else missing_variance(spread.sums.batches)
            reasons.append(f"{side}: {why or 'it was never summed'}")
    sums = facts.sums
    return replace(
        facts,
        relative_variance_A=sides["A"].relative()[0],
        relative_standard_error_A=sides["A"].relative()[1],
        relative_variance_G=sides["G"].relative()[0],
        relative_standard_error_G=sides["G"].relative()[1],
        no_batch_variance="; ".join(reasons) or None,
        sums=None if sums is None else replace(sums, variance_A=sides["A"].sums, variance_G=sides["G"].sums),
    )
