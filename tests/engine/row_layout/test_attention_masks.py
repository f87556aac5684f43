"""Masks drop positions only where they are proven to be a layer's, and targets drop loss terms only.

The oracle runs every example alone, as padded as in its batch, in plain autograd with plain hooks. A mask that has as
many positions as a call drops rows of it where the call's positions are the mask's and none of these rows has a
gradient in any example; which calls' positions are the mask's, each case says by the names of those that are not.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from engine.accumulation import hooks
from engine.factors.factor_set import FactorSet
from tests.oracles import collect, relative_error

EXACT = 1e-10
N, T, VOCABULARY = 6, 8, 19
LENGTHS = (8, 5, 3, 8, 6, 4)


@dataclass
class Plain:
    """What plain autograd says of one module's weight."""

    rows: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Of each call: (T, d) inputs of each example, with the ones of a bias."""
    gradients: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    squares: float = 0.0
    block: Tensor | None = None


def plain(model: nn.Module, inputs: dict[str, Tensor], loss: Callable[[Any, int], Tensor]) -> dict[str, Plain]:
    """Every example of ``inputs`` alone; ``loss`` is of what the model returns and the example's number."""
    found: dict[str, Plain] = defaultdict(Plain)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    # modules of one weight are one that is called several times
    holders = {id(module.weight): name for name, module in reversed(modules.items())}
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    calls: Counter[str] = Counter()
    seen: list[tuple[str, int, Tensor, Tensor]] = []

    def watch(name: str) -> Any:
        def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            output.retain_grad()
            entered = args[0].detach()
            if isinstance(module, nn.Embedding):
                rows = entered.reshape(-1, 1)
            else:
                rows = entered.reshape(-1, entered.shape[-1])
                rows = torch.cat([rows, torch.ones(rows.shape[0], 1)], 1) if module.bias is not None else rows
            seen.append((name, calls[name], rows, output))
            calls[name] += 1

        return after

    handles = [module.register_forward_hook(watch(holders[id(module.weight)])) for module in modules.values()]
    for number in range(N):
        model.zero_grad()
        calls.clear()
        seen.clear()
        returned = model(**{name: value[number : number + 1] for name, value in inputs.items()})
        loss(returned, number).backward()
        for name, call, rows, output in seen:
            gradient = torch.zeros_like(output) if output.grad is None else output.grad
            found[name].rows[call].append(rows)
            found[name].gradients[call].append(gradient.reshape(rows.shape[0], -1))
        for name, module in {**modules, **norms}.items():
            parts = [each.grad.flatten() for each in module.parameters(recurse=False) if each.grad is not None]
            gradient = torch.cat(parts) if parts else torch.zeros(1)
            found[name].squares += float(gradient.square().sum())
            if name in norms:
                held = found[name].block
                outer = torch.outer(gradient, gradient)
                found[name].block = outer if held is None else held + outer
    for handle in handles:
        handle.remove()
    return found


def check(
    whole: FactorSet, truth: dict[str, Plain], terms: int, mask: Tensor | None, others: tuple[str, ...] = ()
) -> set[str]:
    """Compare every layer; returns the calls of which rows were dropped. Calls of ``others`` have other positions."""
    dropped: set[str] = set()
    for layer in whole.layers:
        own = truth[layer.name]
        factors = whole.load(layer.ordinal)
        assert layer.exact_trace == pytest.approx(own.squares / terms, rel=EXACT), layer.name
        if own.block is not None:
            assert relative_error(factors.dense_G, own.block / terms) < EXACT, layer.name
            continue
        entering = []
        for call, rows in own.rows.items():
            kept = [torch.ones(each.shape[0], dtype=torch.bool) for each in rows]
            fits = mask is not None and rows[0].shape[0] == mask.shape[1]
            if fits and mask is not None and f"{layer.name}:{call}" not in others and layer.name not in others:
                masked = [g[~each] for g, each in zip(own.gradients[call], mask, strict=True)]
                if not any(bool(each.any()) for each in masked):
                    kept = list(mask)
                    dropped.add(f"{layer.name}:{call}")
            entering += [each[which] for each, which in zip(rows, kept, strict=True)]
        a, g = torch.cat(entering), torch.cat([each for own_call in own.gradients.values() for each in own_call])
        assert layer.positions == a.shape[0], layer.name
        if layer.form == "diagonal":
            A = torch.bincount(a[:, 0].long(), minlength=factors.A.shape[0]).double() / a.shape[0]
        else:
            A = a.T @ a / a.shape[0]
        assert relative_error(factors.A, A) < EXACT, layer.name
        assert relative_error(factors.dense_G, g.T @ g / terms) < EXACT, layer.name
    return dropped


def covered(whole: FactorSet, truth: dict[str, Plain]) -> FactorSet:
    """``whole`` without bare parameters, and what ``truth`` does not have."""
    return replace(
        whole, layers=tuple(layer for layer in whole.layers if layer.name in truth and layer.form != "diagonal_block")
    )


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def padding() -> Tensor:
    return torch.arange(T) < torch.tensor(LENGTHS)[:, None]


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, vocab_size=VOCABULARY,
        max_position_embeddings=T, tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    model = BertForMaskedLM(config).double().eval()
    # that of the head is another
    model.cls.predictions.bias.requires_grad_(False)
    return model


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=12,
        vocab_size=VOCABULARY, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, vocab_size=VOCABULARY, use_cache=False,
        tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).double().eval()
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def bart() -> nn.Module:
    torch.manual_seed(0)
    config = BartConfig(
        d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=12, decoder_ffn_dim=12, vocab_size=VOCABULARY, max_position_embeddings=16, use_cache=False,
        tie_word_embeddings=False, pad_token_id=1, bos_token_id=0, eos_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    return BartForConditionalGeneration(config).double().eval()


def ids(*, low: int = 3) -> Tensor:
    return torch.randint(low, VOCABULARY, (N, T), generator=torch.Generator().manual_seed(1))


def some(labels: Tensor, share: float = 0.4) -> Tensor:
    """``labels`` of some positions, the others ignored."""
    chosen = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) < share
    chosen[:, 0] = True
    return torch.where(chosen, labels, -100)


def token_loss(targets: Tensor, *, shifted: bool = False) -> Callable[[Any, int], Tensor]:
    def loss(returned: Any, number: int) -> Tensor:
        logits, wanted = returned.logits[0], targets[number]
        logits, wanted = (logits[:-1], wanted[1:]) if shifted else (logits, wanted)
        return functional.cross_entropy(logits, wanted, reduction="sum")

    return loss


@pytest.mark.parametrize("masked", [False, True])
def test_ignored_targets_take_no_positions_away(masked: bool) -> None:
    """A mask of ones is as none."""
    model, inputs = bert(), {"input_ids": ids()}
    targets = some(inputs["input_ids"])
    truth = plain(model, inputs, token_loss(targets))
    if masked:
        inputs["attention_mask"] = torch.ones(N, T, dtype=torch.int64)
    whole = collect(model, [(inputs, targets)], "masked_lm", fisher="empirical", batch_size=4)
    assert check(whole, truth, int((targets != -100).sum()), None) == set()


@pytest.mark.parametrize("masked", [False, True])
def test_prompts_of_a_language_model_count(masked: bool) -> None:
    model, inputs = llama(), {"input_ids": ids()}
    targets = inputs["input_ids"].clone()
    targets[:, :5] = -100
    truth = plain(model, inputs, token_loss(targets, shifted=True))
    if masked:
        inputs["attention_mask"] = torch.ones(N, T, dtype=torch.int64)
    whole = collect(model, [(inputs, targets)], "causal_lm", fisher="empirical", batch_size=4)
    assert whole.declared == ()
    assert sum(layer.form == "block" for layer in whole.layers) == 5
    whole = covered(whole, truth)
    check(whole, truth, int((targets[:, 1:] != -100).sum()), None)


@pytest.mark.parametrize("leading", [False, True])
def test_padding_of_a_language_model_is_dropped(leading: bool) -> None:
    model, mask = llama(), padding().flip(1) if leading else padding()
    inputs = {"input_ids": ids(), "attention_mask": mask.long()}
    targets = torch.where(mask, inputs["input_ids"], -100)
    truth = plain(model, inputs, token_loss(torch.where(mask & mask.roll(1, 1), targets, -100), shifted=True))
    whole = collect(model, [(inputs, targets)], "causal_lm", fisher="empirical", batch_size=4)
    whole = covered(whole, truth)
    dropped = check(whole, truth, int((mask[:, 1:] & mask[:, :-1]).sum()), mask)
    assert dropped == {f"{layer.name}:0" for layer in whole.layers}


@pytest.mark.part(of=32, by=("labelled",))
@pytest.mark.parametrize("batch_size", [1, 4, 6])
@pytest.mark.parametrize("labelled", ["real", "some padding", "late", "all"])
def test_labels_on_padding_count(labelled: str, batch_size: int) -> None:
    """Which positions count does not depend on how examples are cut into batches."""
    model, mask = bert(), padding()
    inputs = {"input_ids": ids(), "attention_mask": mask.long()}
    targets = some(inputs["input_ids"])
    if labelled == "all":
        targets = inputs["input_ids"].clone()
    elif labelled == "real":
        targets = torch.where(mask, targets, -100)
    elif labelled == "late":
        targets = torch.where(mask, targets, -100)
        targets[-1, -1] = 3
    truth = plain(model, inputs, token_loss(targets))
    whole = collect(model, [(inputs, targets)], "masked_lm", fisher="empirical", batch_size=batch_size)
    dropped = check(whole, truth, int((targets != -100).sum()), mask)
    everywhere = {f"{name}:0" for name, each in truth.items() if each.rows and "LayerNorm" not in name}
    if labelled == "real":
        assert dropped == everywhere
    else:
        # what padding only attends from has no gradient in keys and values
        assert dropped == {name for name in everywhere if "self.key" in name or "self.value" in name}


@pytest.mark.part(of=32, by=("make",))
@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("ignored", [False, True])
def test_an_encoders_mask_is_not_laid_on_its_decoder(make: Callable[[], nn.Module], ignored: bool) -> None:
    model, mask = make(), padding()
    inputs = {"input_ids": ids(), "attention_mask": mask.long(), "decoder_input_ids": ids().flip(1)}
    # without a gradient in the decoder where the encoder is padded, and with one
    targets = torch.where(mask, ids(), -100) if ignored else ids()
    truth = plain(model, inputs, token_loss(targets))
    whole = covered(collect(model, [(inputs, targets)], "masked_lm", fisher="empirical", batch_size=4), truth)
    across = ("EncDecAttention.k", "EncDecAttention.v", "encoder_attn.k_proj", "encoder_attn.v_proj")
    own = {layer.name for layer in whole.layers if "decoder" in layer.name and not layer.name.endswith(across)}
    dropped = check(whole, truth, int((targets != -100).sum()), mask, (*own, "lm_head", "shared:1"))
    encoders = [
        layer.name
        for layer in whole.layers
        if layer.form == "kronecker" and ("encoder.block" in layer.name or "encoder.layers" in layer.name)
    ]
    assert len(encoders) >= 6
    assert {f"{name}:0" for name in encoders} <= dropped


class Captioned(nn.Module):
    """As many patches as tokens; the mask is the tokens'."""

    def __init__(self, *, honoured: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Linear(5, 4)
        self.table = nn.Embedding(VOCABULARY, 4)
        self.tokens = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(8, 3)
        self.honoured = honoured
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        images = self.patches(pixel_values).tanh().mean(1)
        texts = self.norm(self.tokens(self.table(input_ids)).tanh())
        weights = attention_mask.unsqueeze(-1).double() if self.honoured else torch.ones(*input_ids.shape, 1)
        return self.head(torch.cat([images, (texts * weights).sum(1) / weights.sum(1)], 1))


@pytest.mark.part(of=16, by=("honoured",))
@pytest.mark.parametrize("fisher", ["empirical", "forward_only"])
@pytest.mark.parametrize("honoured", [False, True])
def test_patches_are_no_tokens_and_pooling_may_forget_the_mask(honoured: bool, fisher: str) -> None:
    model, mask = Captioned(honoured=honoured), padding()
    pixels = torch.randn(N, T, 5, generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": ids(), "attention_mask": mask.long(), "pixel_values": pixels}
    targets = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(4))
    if fisher == "forward_only":
        whole = collect(model, [(inputs, targets)], "classification", fisher=fisher, batch_size=4)
        positions = {layer.name: layer.positions for layer in whole.layers}
        tokens = sum(LENGTHS) if honoured else N * T
        assert positions == {"patches": N * T, "table": tokens, "tokens": tokens, "head": N}
        return
    truth = plain(
        model, inputs, lambda returned, number: functional.cross_entropy(returned, targets[number : number + 1])
    )
    whole = collect(model, [(inputs, targets)], "classification", fisher=fisher, batch_size=4)
    dropped = check(whole, truth, N, mask, ("patches",))
    assert dropped == ({"table:0", "tokens:0"} if honoured else set())


class Trigrams(nn.Module):
    """Each position also sees its neighbours' vectors, as in MobileBERT; pooling knows the mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, 4)
        self.tokens = nn.Linear(12, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        vectors = functional.pad(self.table(input_ids), (0, 0, 1, 1))
        texts = self.tokens(torch.cat([vectors[:, :-2], vectors[:, 1:-1], vectors[:, 2:]], 2)).tanh()
        weights = attention_mask.unsqueeze(-1).double()
        return self.head((texts * weights).sum(1) / weights.sum(1))


def test_content_of_padding_may_reach_a_neighbour() -> None:
    """What is behind the neighbours is dropped; the table, whose padding has a gradient, keeps all positions."""
    model, mask = Trigrams(), padding()
    inputs = {"input_ids": ids(), "attention_mask": mask.long()}
    targets = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(4))
    truth = plain(
        model, inputs, lambda returned, number: functional.cross_entropy(returned, targets[number : number + 1])
    )
    whole = collect(model, [(inputs, targets)], "classification", fisher="empirical", batch_size=4)
    assert check(whole, truth, N, mask) == {"tokens:0"}


def test_a_late_gradient_in_padding_is_collected_anew_by_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `ekfac` and slices of a batch the calls that a batch has shown keep all their positions."""
    model, mask = bert(), padding()
    inputs = {"input_ids": ids(), "attention_mask": mask.long()}
    targets = torch.where(mask, some(inputs["input_ids"]), -100)
    targets[-1, -1] = 3
    truth = plain(model, inputs, token_loss(targets))
    whole = collect(model, [(inputs, targets)], "masked_lm", fisher="empirical", batch_size=2, ekfac=True)
    check(whole, truth, int((targets != -100).sum()), mask)
    for layer in whole.layers:
        assert whole.load_corrected is not None
        total = float(whole.load_corrected(layer.ordinal).eigenvalues.sum())
        assert total == pytest.approx(layer.exact_trace, rel=1e-9), layer.name
    monkeypatch.setattr(hooks, "note_reached", lambda *_: None)
    blind = collect(model, [(inputs, targets)], "masked_lm", fisher="empirical", batch_size=2)
    with pytest.raises(AssertionError):
        check(blind, truth, int((targets != -100).sum()), mask)
