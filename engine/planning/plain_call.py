"""The plain call: a model's first batch by itself, which alone can say that data and model do not belong together."""

import dataclasses

import torch

from engine.collection.pass_job import PassJob
from engine.errors import EngineError, ModelRefused
from engine.model.outputs import predict


def explain_refusal(job: PassJob, refused: ModelRefused) -> ModelRefused:
    """Say of a model that raised whether it does so by itself, or only where it is watched.

    Args:
        job: The model with its data and task.
        refused: What a probe, a check or a pass ended with.

    Returns:
        The refusal itself where the model raises in a plain call too, or on a later batch than the first; else one that
        does not blame the data.
    """
    batch = job.probed_batch()
    if refused.pointer != "/data" or refused.examples is None or batch.index.is_meta:
        return refused
    if not set(refused.examples) <= set(batch.index.tolist()):
        return refused
    unlabelled = job.task if job.task.likelihood == "model" else dataclasses.replace(job.task, loss=None)
    try:
        with torch.enable_grad():
            predict(job.model, job.moved(batch), unlabelled)
    except EngineError:
        return refused
    said = refused.message.partition("; check that data and model")[0]
    return ModelRefused(
        f"{said}; by itself the model runs on its first batch, so it raises where its layers are watched, or on a part "
        "of that batch: let `forward` work on any number of examples, and on parameters that need no gradient",
        layer=refused.layer,
        pointer="/model",
    )
