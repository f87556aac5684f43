"""Expert tokens: how many positions each expert of a model was sent, and which got too few for factors of full rank.

T rows and d columns bound a rank by min(T, d); d/T times as many data, routed alike, make T = d. Under `reduce` rows of
A are the examples with a token, those of G all examples. What counts as an expert is said in `docs/convention.md`.
"""

import re
from typing import Any

from catalog.analyses.analysis import ExpertTokens, StarvedExpert
from engine.factors.factor_set import FactorSet, LayerFacts

_NAMED = re.compile(r"experts?(?:\.(?:expert_)?\d+(?=\.|$)|(?:\.\w+)*\[\d+\]$)", re.IGNORECASE)
_SLICE = re.compile(r"\[\d+\]$")


def expert_tokens(whole: FactorSet) -> ExpertTokens | None:
    """Return the tokens that the experts of a model were sent; None where it has none."""
    sent = [(facts.name, facts.positions) for facts in whole.layers]
    sent += [(row.name, 0) for row in whole.declared if row.reason == "never_routed"]
    counts: dict[str, set[int]] = {}
    for name, tokens in sent:
        counts.setdefault(_SLICE.sub("", name), set()).add(tokens)
    named = {facts.name for facts in whole.layers if _NAMED.search(facts.name)}
    named |= {name for name, _ in sent if len(counts[_SLICE.sub("", name)]) > 1}
    experts = [facts for facts in whole.layers if facts.form == "kronecker" and facts.name in named]
    # a module without tokens is declared as one without a gradient, which one like it has
    alike = {_NAMED.sub("", facts.name) for facts in experts}
    idle = [
        row.name
        for row in whole.declared
        if row.reason == "never_routed" or (row.reason == "no_gradient" and _NAMED.sub("", row.name) in alike)
    ]
    if not experts and not idle:
        return None
    starved = sorted(filter(None, map(_starved, experts)), key=lambda each: -each.times_more)
    return ExpertTokens(
        layers=len(experts) + len(idle),
        fewest=0 if idle else min(facts.positions for facts in experts),
        most=max((facts.positions for facts in experts), default=0),
        starved=len(starved),
        most_starved=tuple(starved[:8]),
        unreached=len(idle),
        unreached_layers=tuple(idle[:64]),
    )


def _starved(layer: LayerFacts) -> StarvedExpert | None:
    sides = (("A", layer.rank_bound_A, layer.in_dim), ("G", layer.rank_bound_G, layer.out_dim))
    more, side, rows, size = max((size / (rows or size), side, rows or 0, size) for side, rows, size in sides)
    named: dict[str, Any] = {"layer": layer.name, "tokens": layer.positions, "factor": side}
    return StarvedExpert(**named, rank_bound=rows, columns=size, times_more=more) if more > 1 else None
