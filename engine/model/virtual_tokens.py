"""Virtual tokens: positions that prompt tuning puts before a sequence, and that no token of the data answers for.

With k of them the outputs have k positions more than the data has tokens. They get targets that are
ignored, and a mask that counts them, as PEFT gives its own loss: then the last one answers for the
first token, whose term a model without a prompt does not have.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from catalog.requests.inputs import Task
from engine.model.batches import Batch


def virtual_tokens(model: nn.Module) -> int:
    """Count the positions that a model puts before those of the data."""
    config: Any = getattr(model, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False) or "PREFIX" in str(getattr(config, "peft_type", "")):
        return 0
    return int(getattr(config, "num_virtual_tokens", 0) or 0)


def with_virtual_tokens(model: nn.Module, batch: Batch, task: Task) -> Batch:
    """Extend targets and mask to the positions that the model puts in front."""
    count = virtual_tokens(model) if task.type in ("causal_lm", "masked_lm", "token_classification") else 0
    ids = batch.targets
    if ids is None and isinstance(batch.inputs, dict) and task.type == "causal_lm":
        ids = batch.inputs.get("input_ids")
    if count == 0 or not isinstance(ids, Tensor) or ids.ndim != 2:
        return batch
    inputs: dict[str, Tensor] = {}
    if batch.mask is not None:
        inputs["attention_mask"] = torch.cat([batch.mask.new_ones(batch.size, count), batch.mask], 1)
    targets = torch.cat([ids.new_full((batch.size, count), task.ignore_index), ids], 1)
    return replace(batch, inputs=inputs, targets=targets)
