"""The batches of a dry run: copies of one example, or the first batch as it is."""

from torch import Tensor

from engine.collection.pass_job import PassJob
from engine.collection.probe import Probe
from engine.gradient_identity.picked_examples import different_examples, pick_examples
from engine.model.batches import Batch, map_tensors

DRY_EXAMPLES = (2, 3)
"""One example, repeated. Not once alone: a model may squeeze a batch of one away."""
_DIFFERENT_EXAMPLES = 5
"""So many different ones show which layers are given rows of some alone."""


def samples_of(job: PassJob, seen: Probe) -> list[Batch]:
    """Return the batches of a dry run: one example repeated, or the first batch as it is."""
    batch = job.moved(job.probed_batch())
    if seen.whole:
        return [batch]
    sizes = (1,) if job.collection.batch_size == 1 else DRY_EXAMPLES
    return [repeated(batch, size) for size in sizes]


def different_sample(batch: Batch) -> Batch:
    """Return a few different examples of a batch, which may take different ways through a model."""
    return pick_examples(batch, different_examples(batch, _DIFFERENT_EXAMPLES))


def repeated(batch: Batch, times: int) -> Batch:
    """Return the first example of a batch, repeated."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor[:1].repeat_interleave(times, 0)

    return Batch(
        inputs=map_tensors(batch.inputs, copied),
        targets=map_tensors(batch.targets, copied),
        index=copied(batch.index),
    )
