"""A tiny Llama whose blocks, table and head are sharded, what it is measured on, and a record of what stands whole."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from kronoscope.local import Measurement, measure

EXAMPLES, BATCH, VOCABULARY = 14, 4, 50


def llama() -> nn.Module:
    """Two key heads, two blocks, 50 tokens: sizes that two and four ranks do not divide are among them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=31,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def units(model: nn.Module) -> list[nn.Module]:
    return [*model.model.layers, model.model.embed_tokens, model.lm_head, model]


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in units(model):
        fully_shard(module, mesh=mesh)
    return model


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Four batches, the last one of two examples."""
    ids = torch.randint(0, VOCABULARY, (EXAMPLES, 5), generator=torch.Generator().manual_seed(1))
    index = torch.arange(EXAMPLES)
    return [(ids[i : i + BATCH], ids[i : i + BATCH], index[i : i + BATCH]) for i in range(0, EXAMPLES, BATCH)]


def measured(model: nn.Module, data: Sequence[Any], memory: Any = None, **options: Any) -> Measurement:
    collection = {"batch_size": BATCH, "dtype": "float64", "self_check": "off", **options}
    return measure(
        model, data, task="causal_lm", kinds=("factors",), collection=collection, woodbury={"policy": "dense"},
        memory=memory,
    )  # fmt: skip


@contextmanager
def watched(model: nn.Module) -> Iterator[list[int]]:
    """Bytes of parameters that stand whole, at each call of a module and each gradient of its output.

    Read off the storages of whatever stands in the parameters' places, so it knows nothing of who fills them.
    """
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(sum(each.untyped_storage().nbytes() for each in model.parameters() if each.device.type != "meta"))

    def called(module: nn.Module, args: object, output: Any) -> None:
        look()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: look())

    handles = [module.register_forward_hook(called) for module in model.modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def whole_bytes(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())
