"""Virtual tokens: a tuned prompt's rows and traces are those of plain autograd, each example alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import WrongShape
from tests.oracles import collect

IGNORED = -100
PROMPT = 3


class Tuned(nn.Module):
    """A small causal model behind three virtual tokens; says of itself what PEFT's models say."""

    def __init__(self, kind: str = "PeftType.PROMPT_TUNING") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prompt, self.table = nn.Embedding(PROMPT, 8), nn.Embedding(20, 8)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 20)
        for parameter in (*self.table.parameters(), *self.mix.parameters()):
            parameter.requires_grad_(False)
        self.active_peft_config = SimpleNamespace(is_prompt_learning=True, peft_type=kind, num_virtual_tokens=PROMPT)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        examples = input_ids.shape[0]
        places = torch.arange(PROMPT, device=input_ids.device).unsqueeze(0).expand(examples, -1)
        h = torch.cat([self.prompt(places), self.table(input_ids)], 1)
        if attention_mask is not None:
            h = h * torch.cat([attention_mask.new_ones(examples, PROMPT), attention_mask], 1)[..., None]
        # each position sees all before it
        return {"logits": self.head(torch.tanh(self.mix(h)).cumsum(1) / 5)}


def data(*, padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (7, 6), generator=generator)
    mask = torch.ones(7, 6, dtype=torch.int64)
    if padded:
        mask[1:4, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}


def own_gradients(model: Tuned, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Σ ‖∇ℓ_n‖² of each parameter, and the loss terms: the prompt's last position answers for the first token."""
    squares: dict[str, Tensor] = {}
    terms = 0
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for row in range(7):
        one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        labels = one["input_ids"].clone()
        if "attention_mask" in one:
            labels[one["attention_mask"] == 0] = IGNORED
        logits = model(**one)["logits"][0, PROMPT - 1 : -1]
        loss = functional.cross_entropy(logits, labels[0], ignore_index=IGNORED, reduction="sum")
        terms += int((labels != IGNORED).sum())
        for name, gradient in zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True):
            squares[name] = squares.get(name, torch.zeros(())) + gradient.square().sum()
    return squares, terms


@pytest.mark.part(of=32, by=("padded",))
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("targets", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_a_tuned_prompt_is_that_of_plain_autograd(batch_size: int, *, padded: bool, targets: bool) -> None:
    model, inputs = Tuned(), data(padded=padded)
    chunk: tuple[Any, ...] = (inputs, inputs["input_ids"] if targets else None)
    whole = collect(model, [chunk], "causal_lm", fisher="empirical", exact_trace=True, batch_size=batch_size)
    squares, terms = own_gradients(model, inputs)
    assert {name for layer in whole.layers for name in layer.parameters} == set(squares)
    for layer in whole.layers:
        assert layer.terms == terms
        own = sum(float(squares[name]) for name in layer.parameters) / terms
        assert layer.exact_trace == pytest.approx(own, rel=1e-10)


def test_a_prefix_of_keys_and_values_adds_no_position() -> None:
    inputs = data(padded=False)
    with pytest.raises(WrongShape, match=r"targets of shape \(4, 9\)"):
        collect(Tuned("PeftType.PREFIX_TUNING"), [(inputs, inputs["input_ids"])], "causal_lm")
