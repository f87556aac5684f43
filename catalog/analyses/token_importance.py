"""Token importance: how much of a language model's curvature each token of its vocabulary carries."""

from catalog.record import record


@record
class TokenImportance:
    """The exact diagonal of G of the head, one number a token, by which a vocabulary is pruned.

    Under K-FAC the block of the curvature that belongs to a token's row of weights has the trace `G_vv · tr(A)`, so
    that tokens stand in the same order. Where it cannot be had all but `layer` and `why` is null.
    """

    layer: str
    """The head, as `capacity.token_importance` names it."""
    why: str | None
    """Why there is none; null where there is."""
    tokens: int | None
    """Rows of G."""
    artifact: str | None
    """File with `importance`, (tokens,) float64, in the order of the vocabulary."""
    trace: float | None
    """Their sum, the trace of G."""
    tokens_for_99_percent: int | None
    """Fewest tokens that carry 99 % of it; the others are what pruning by it removes first."""
    most: tuple[int, ...] | None
    """The ten tokens of the largest importance, descending; of equals the first."""
