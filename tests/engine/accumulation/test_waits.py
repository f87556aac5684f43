"""Waits: what a batch asks of the device and must wait for does not grow with the layers of the model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForTokenClassification

from engine.collect import collect_or_read
from engine.collection import data_pass
from tests.oracles import workspace

WAITS = ("nonzero", "_local_scalar_dense", "is_nonzero", "equal", "masked_select", "item")


class Waiting(TorchDispatchMode):
    """Counts the operations whose result a host must have before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        picks = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        if name in WAITS or picks:
            self.counts["index by booleans" if picks else name] += 1
        return func(*args, **dict(kwargs or {}))


def waits(monkeypatch: pytest.MonkeyPatch, layers: int, sharing: str) -> Counter[str]:
    """What the second batch of a padded collection waits for."""
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        num_labels=5,
    )
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[1:, 6:] = 0
    ids = torch.randint(1, 50, (2, 4, 9))
    data = [({"input_ids": each, "attention_mask": mask}, torch.where(mask.bool(), each % 5, -100)) for each in ids]
    found: list[Counter[str]] = []
    update = data_pass.update

    def counted(*args: Any) -> int:
        with Waiting() as mode:
            done = update(*args)
        found.append(mode.counts)
        return done

    with monkeypatch.context() as patched:
        patched.setattr(data_pass, "update", counted)
        made = workspace(
            BertForTokenClassification(config), data, "token_classification", fisher="empirical", sharing=sharing,
            batch_size=4, exact_trace=False, self_check="off",
        )  # fmt: skip
        whole = collect_or_read(made)
    assert len(whole.layers) > 6 * layers
    return found[-1]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_waits_do_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch, sharing: str) -> None:
    few, many = (waits(monkeypatch, layers, sharing) for layers in (1, 4))
    assert few
    assert few == many
