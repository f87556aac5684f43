"""Adapters of PEFT on a small GPT-2 or Llama: what is trainable is the adapter."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architecture_cases.case import EXAMPLES, Builder, Case, enlivened, tokens
from benchmarks.architecture_cases.language import GROUPED, model_of

T = 8


def adapter(
    config: str,
    *,
    merged: bool = False,
    loss: str | None = None,
    target: tuple[str, ...] = ("q_proj", "v_proj"),
    **options: Any,  # noqa: ANN401 - a configuration's own
) -> Builder:
    """Llama with an adapter; ``merged`` into its weights beforehand, which are then trainable."""

    def build() -> Case:
        peft = importlib.import_module("peft")
        base = model_of("LlamaForCausalLM", **GROUPED)
        own = {"target_modules": list(target)} if target else {}
        model = peft.get_peft_model(base, getattr(peft, config)(**own, task_type="CAUSAL_LM", **options))
        enlivened(model, seed=1)
        if merged:
            model = model.merge_and_unload().requires_grad_()
        ids = tokens(EXAMPLES, T)
        return Case(
            model=model, inputs={"input_ids": ids}, targets=ids, task="causal_lm", loss=loss, prompted=loss == "model"
        )

    return build


class Merging(nn.Module):
    """A linear layer that adds its adapter to its weight inside the product: ``x (W + s B A)ᵀ``."""

    def __init__(self, into: int, out: int, rank: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out, into), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(rank, into))
        self.up = nn.Parameter(torch.zeros(out, rank))

    def forward(self, x: Tensor) -> Tensor:
        """One product with the sum."""
        return nn.functional.linear(x, self.weight + 0.5 * self.up @ self.down)


def inside() -> Case:
    """LoRA inside a product."""
    model = nn.Sequential(Merging(5, 7), nn.Tanh(), nn.Linear(7, 3))
    inputs = torch.randn(EXAMPLES, 5, dtype=torch.float64)
    return Case(model=enlivened(model), inputs=inputs, targets=torch.randint(0, 3, (EXAMPLES,)), task="classification")


CASES: dict[str, Builder] = {
    "LoRA": adapter("LoraConfig", r=2),
    "LoRA, all linear layers": adapter("LoraConfig", r=2, target=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "LoRA, merged": adapter("LoraConfig", r=2, merged=True),
    "LoRA inside a product": inside,
    "LoRA on embeddings": adapter("LoraConfig", r=2, target=("embed_tokens",)),
    "DoRA": adapter("LoraConfig", r=2, use_dora=True),
    "LoHa": adapter("LoHaConfig", r=2),
    "LoKr": adapter("LoKrConfig", r=2),
    "OFT": adapter("OFTConfig", r=0, oft_block_size=4),
    "BOFT": adapter("BOFTConfig", boft_block_size=4),
    "VeRA": adapter("VeraConfig", r=4, target=("q_proj", "o_proj")),
    "IA3": adapter("IA3Config", target=("k_proj", "v_proj", "down_proj"), feedforward_modules=["down_proj"]),
    "Prompt tuning": adapter("PromptTuningConfig", loss="model", target=(), num_virtual_tokens=3),
    "P-tuning": adapter("PromptEncoderConfig", loss="model", target=(), num_virtual_tokens=3, encoder_hidden_size=12),
    "Prefix tuning": adapter("PrefixTuningConfig", target=(), num_virtual_tokens=3),
    "AdaLoRA": adapter("AdaLoraConfig", init_r=2, target_r=2, total_step=10),
    "LN tuning": adapter("LNTuningConfig", target=("input_layernorm",)),
}  # fmt: skip
