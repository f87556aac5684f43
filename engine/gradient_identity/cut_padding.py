"""Cut examples: whether what a collection leaves out with the padding has no gradient.

Where a batch goes through in groups of like length (``padding``), the rows of a layer are those of examples without
their padding. That padding decides no output was tried before; it may still have a gradient, as the vector of a
padding token has that happens to be zero, and nobody looks at rows that were never made. So the most padded
example of the first batch is cut, and its rows are held against plain autograd on the example as it is.
"""

from collections.abc import Sequence

from engine.errors import EngineError
from engine.gradient_identity.checked_model import Subject
from engine.gradient_identity.completeness import completeness
from engine.gradient_identity.gradients import LayerRows
from engine.gradient_identity.picked_examples import pick_examples
from engine.gradient_identity.recorded_rows import Forward, record
from engine.gradient_identity.reference import Objective
from engine.layers.layer import TreatedLayer
from engine.model.batches import Batch
from engine.row_layout.length_buckets import group_by_length


def padding_has_no_gradient(subject: Subject, layers: Sequence[TreatedLayer], batch: Batch, seed: int) -> bool:
    """Return whether the most padded example of ``batch`` has the same gradients when its padding is cut off.

    Memory:
        The rows of one example, twice, and the gradient of one parameter, twice.
    """
    if not subject.has_gradients or batch.mask is None:
        return True
    *_, shortest = group_by_length(batch, subject.task)
    place = int((batch.index == shortest.index[-1]).nonzero()[0, 0])
    whole = pick_examples(batch, [place])
    cut = next(group_by_length(whole, subject.task))
    if cut.mask is None or cut.mask.shape == batch.mask[:1].shape:
        return True
    try:
        padded = Forward(batch=whole, start=seed)
        short = record(subject, layers, Forward(batch=cut, start=seed))
        cotangent = record(subject, layers, padded).cotangent
        if cotangent is None:
            return short.cotangent is None
        own = {name: LayerRows(recorder=each, example=0) for name, each in short.layers.items()}
        objective = Objective(forward=padded, cotangent=cotangent)
        errors = completeness(subject, own, {}, objective).errors
    except EngineError:
        return False
    return all(error <= subject.tolerance for error in errors.values())
