"""Bytes of the factors with one A per shared input and one triangle, against dense factors of every layer.

Counted from what is stored, on decoders built from configurations: a GPT-2 block has one fused
projection, a Llama block feeds q, k and v (and gate and up) with one tensor each.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import results_file
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.collect import collect_or_read
from engine.factors.factor_files import write_factors
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace


class Counting:
    """Artifacts that are measured and forgotten."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def save_tensors(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:  # noqa: ARG002 - the port's signature
        """Count."""
        self.size_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def decoder() -> nn.Module:
    """Llama's proportions (MLP 3.5 times as wide, a quarter of the key heads) at a hundredth of the size."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=896, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def main() -> None:
    """Collect once and count."""
    ids = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(1))
    chunk: tuple[Any, Any] = ({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids)
    counting = Counting()
    whole = collect_or_read(
        Workspace(
            inputs=ModelInputs(model=decoder(), batches=lambda: iter([chunk]), task=Task(type="causal_lm")),
            options=JobOptions(collection=Collection(batch_size=4)),
            ports=Ports(artifacts=counting),
        )
    )
    dense = 0
    for facts in whole.layers:
        if facts.form != "kronecker" or facts.name == "lm_head":
            continue
        write_factors(counting, facts, whole.load(facts.ordinal))  # type: ignore[arg-type]
        dense += 4 * (facts.in_dim**2 + facts.out_dim**2)
    ratio = counting.size_bytes / dense
    # an 8B Llama's decoder factors take 98.5 GB dense and 46.0 GB so, 0.467 of it
    results_file.write(
        "shared_activation_bytes",
        [results_file.claim("stored bytes of a Llama-shaped decoder's factors over dense ones", ratio, 0.47)],
        {"stored_bytes": counting.size_bytes, "dense_bytes": dense, "layers": len(whole.layers)},
    )


if __name__ == "__main__":
    main()
