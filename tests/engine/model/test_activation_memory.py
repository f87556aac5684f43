"""What autograd saves, told in a dry run; and models that compute their layers again instead of keeping them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from catalog.requests.memory import Memory
from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import digest
from engine.memory.budget import MemoryBudget
from engine.model.activation_memory import Saved, checkpointing_layers, set_activation_checkpointing, trace_saved_bytes
from engine.planning import job_plan
from engine.workspace import Workspace
from tests.oracles import workspace


class Known(nn.Module):
    """A net of which it is known what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 100), nn.Linear(100, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("held", [False, True])
def test_saved_bytes_of_a_known_net(held: bool) -> None:
    model = Known().requires_grad_(False)
    plain, again, met, _ = trace_saved_bytes(
        lambda size: model(torch.ones(size, 10)), (2, 5), model, dict.fromkeys(model.children(), held)
    )
    # tanh keeps its output, which is the second layer's input; without weight gradients a linear layer keeps none, but
    # the graph begins at the first one's output
    assert plain == Saved(fixed_bytes=0, example_bytes=4 * (100 + 100 + 10 * held))
    assert again is None
    # the wider moment is the second layer's: all that is saved, and its own gradients; inputs that are held are so
    # until the last gradient has arrived, which makes it the first layer's
    assert met == Saved(fixed_bytes=0, example_bytes=4 * (210 + 110 if held else 200 + 107))
    assert met.within([model.second]).of(1) == met.of(1) - 4 * 10 * held
    assert plain.of(8) == 8 * plain.example_bytes
    assert not model.first._forward_hooks


def test_what_does_not_grow_is_told_apart() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * torch.arange(1000.0).view(250, 4).sum(0) * torch.ones(250, 1, 1)

    model = Biased().requires_grad_(False)
    plain, *_ = trace_saved_bytes(lambda size: model(torch.ones(size, 4)), (2, 3), model, {model.layer: False})
    assert plain.fixed_bytes >= 1000
    assert plain.of(3) == plain.fixed_bytes + 3 * plain.example_bytes


SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 20}
MODELS: dict[str, Any] = {
    # its layers drop out by themselves, in training mode
    "opt": lambda: OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=16, dropout=0.5)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=20, n_positions=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32)),
    "bert": lambda: BertForSequenceClassification(BertConfig(**SIZES, intermediate_size=32)),
}


def space(name: str, wish: str, **options: Any) -> Workspace:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    ids = torch.randint(3, 20, (6, 8), generator=torch.Generator().manual_seed(1))
    task, targets = ("sequence_classification", ids[:, 0] % 2) if name == "bert" else ("causal_lm", ids)
    data = [({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, targets)]
    made = workspace(model, data, task, **({"fisher": "mc", "dtype": "float32", "batch_size": 6} | options))
    made.options.memory = Memory(activation_checkpointing=wish)  # type: ignore[arg-type]
    return made


def digests(whole: FactorSet) -> list[tuple[str, str, str]]:
    loaded = [whole.load(layer.ordinal) for layer in whole.layers]
    return [(factors.layer, digest(factors.A), digest(factors.G)) for factors in loaded]


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"fisher": "empirical", "sharing": "reduce"}], ids=str)
def test_activation_checkpointing_leaves_the_digests(name: str, options: dict[str, Any]) -> None:
    kept, again = space(name, "off", **options), space(name, "on", **options)
    plans: list[Mapping[str, Any]] = []
    again.ports.announce_plan = plans.append
    runs = []
    assert again.inputs.model is not None
    layers = checkpointing_layers(again.inputs.model)
    for layer in layers.values():
        layer.register_forward_pre_hook(lambda *_: runs.append(1))
        next(layer.children()).register_forward_pre_hook(lambda *_: runs.append(0))
    before = [vars(module).copy() for module in again.inputs.model.modules()]
    assert digests(collect_or_read(again)) == digests(collect_or_read(kept))
    assert plans[0]["activation_checkpointing"]
    # every layer's inside ran again
    assert runs.count(0) > runs.count(1)
    assert len(layers) == 3
    after = [vars(module) for module in again.inputs.model.modules()]
    assert [sorted(state) for state in after] == [sorted(state) for state in before]
    assert all(module.training for module in again.inputs.model.modules())


class Planned(Exception):
    """Ends a collection once its plan stands."""


def test_auto_is_for_a_single_example_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_plan, "resident_bytes", lambda: 0)

    def plan(wish: str, budget: int = 2**62) -> dict[str, Any]:
        plans: list[Mapping[str, Any]] = []
        made = space("llama", wish, exact_trace=False, self_check="off")
        ids = torch.randint(3, 20, (6, 500))

        def stop(plan: Mapping[str, Any]) -> None:
            plans.append(plan)
            raise Planned

        made.inputs.batches, made.ports.announce_plan = lambda: iter([({"input_ids": ids}, ids)]), stop
        made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=budget)
        if wish != "auto":
            made.options.memory = Memory(activation_checkpointing=wish, micro_batch=1)  # type: ignore[arg-type]
        with pytest.raises(Planned):
            collect_or_read(made)
        return dict(plans[0])

    kept, again = plan("off"), plan("on")
    saved, smaller = (
        next(term["size_bytes"] for term in one["terms"] if term["name"] == "activations") for one in (kept, again)
    )
    assert smaller < 0.6 * saved
    assert plan("auto", kept["host_peak_bytes"])["activation_checkpointing"] is False
    tight = plan("auto", kept["host_peak_bytes"] - 1)
    assert tight["activation_checkpointing"] is True
    assert tight["host_peak_bytes"] < kept["host_peak_bytes"]
    assert "activation checkpointing" in tight["why"]


def test_where_a_model_offers_none_it_is_said() -> None:
    said: list[str] = []
    x = torch.randn(6, 10)
    made = workspace(Known(), [(x, torch.zeros(6, 7))], "regression", fisher="mc")
    made.options.memory, made.ports.log = Memory(activation_checkpointing="on"), lambda _, message: said.append(message)
    collect_or_read(made)
    assert any("offers none" in message for message in said)
    with set_activation_checkpointing(Known(), wanted=True):
        pass
