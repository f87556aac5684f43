"""Waits: what a batch asks of the device and must wait for does not grow with the layers of the model."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForTokenClassification

from engine.collect import collect_or_read
from engine.collection import data_pass
from tests.oracles import workspace

WAITS = ("nonzero", "_local_scalar_dense", "is_nonzero", "equal", "masked_select", "item", "bincount")


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


class Encoder(nn.Module):
    """Attention whose weights enter products as parameters, not as modules."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 5)
        self.attention = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.attention:
            x = x + layer(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)[0]
        return self.head(x)


def bert(layers: int) -> nn.Module:
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        num_labels=5,
    )
    return BertForTokenClassification(config)


def waits(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **options: Any) -> Counter[str]:
    """What the second batch of a padded collection waits for."""
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[1:, 6:] = 0
    ids = torch.randint(1, 50, (2, 4, 9))
    data = [({"input_ids": each, "attention_mask": mask}, torch.where(mask.bool(), each % 5, -100)) for each in ids]
    found: list[Counter[str]] = []
    update, as_list = data_pass.update, torch.Tensor.tolist

    def counted(*args: Any) -> int:
        with Waiting() as mode, monkeypatch.context() as patched:

            def listed(tensor: Tensor) -> Any:
                # no operation of a host's, and a copy from a device
                mode.counts["tolist"] += 1
                return as_list(tensor)

            patched.setattr(torch.Tensor, "tolist", listed)
            done = update(*args)
        found.append(mode.counts)
        return done

    with monkeypatch.context() as patched:
        patched.setattr(data_pass, "update", counted)
        made = workspace(
            model, data, "token_classification", fisher="empirical", batch_size=4, self_check="off", **options
        )
        collect_or_read(made)
    return found[-1]


@pytest.mark.part(of=32, by=("kind",))
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("exact_trace", [False, True])
@pytest.mark.parametrize("kind", [bert, Encoder])
def test_waits_do_not_grow_with_the_layers(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[int], nn.Module], sharing: str, *, exact_trace: bool
) -> None:
    few, many = (
        waits(monkeypatch, kind(layers), sharing=sharing, exact_trace=exact_trace) for layers in (1, 4)
    )  # fmt: skip
    assert few
    assert few == many
