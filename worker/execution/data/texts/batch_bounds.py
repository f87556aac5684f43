"""Bounds of batches of texts: as many as asked for; of one length where the model reads no mask.

Such a model, as FNet, takes padding for text: what it gives for one text would depend on the others of its batch.
"""

import itertools
from collections.abc import Iterator, Sequence

from worker.execution.loaded_model import Vocabulary


def reads_mask(vocabulary: Vocabulary) -> bool:
    """Return whether a model is given which tokens are padding; one that takes bare ids is not asked."""
    return not vocabulary.arguments or "attention_mask" in vocabulary.arguments


def batch_bounds(lengths: Sequence[int], batch_size: int, vocabulary: Vocabulary) -> Iterator[slice]:
    """Yield the texts of each batch, in their order.

    Args:
        lengths: Tokens of each text.
        batch_size: Texts of a batch at most.
        vocabulary: That of the model, which may read no mask.
    """
    ends = [len(lengths)]
    if not reads_mask(vocabulary):
        ends = [place for place, (one, other) in enumerate(itertools.pairwise(lengths), 1) if one != other] + ends
    begin = 0
    for end in ends:
        for start in range(begin, end, batch_size):
            yield slice(start, min(start + batch_size, end))
        begin = end
