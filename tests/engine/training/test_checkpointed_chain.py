"""Checkpointed chains: the gradients of the pass that keeps everything, bit for bit, and buffers that move once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.training.checkpointed_chain import find_chain, require_composition, run_chain
from engine.training.split_gradients import split_gradients
from tests.engine.training.nets import Head, images, make


def spectral_net() -> nn.Module:
    """A net with a step of the power method in every forward pass, which its buffers remember."""
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(128, 20))
    return nn.Sequential(nn.Flatten(), spectral, nn.Tanh(), nn.Linear(20, 10)).double()


@pytest.mark.parametrize("build", [lambda: make("conv"), lambda: make("residual"), spectral_net])
def test_gradients_and_buffers_are_those_of_the_undivided_step_bit_for_bit(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, head, x = build(), Head(), images()
    twin, twin_head = copy.deepcopy(model), copy.deepcopy(head)
    torch.manual_seed(2)
    split_gradients(model, head.contrastive, x, checkpointing=True)
    torch.manual_seed(2)
    twin_head.contrastive(twin(x)).backward()
    for one, other in ((model, twin), (head, twin_head)):
        truth = dict(other.named_parameters())
        assert any(each.grad is not None for each in truth.values())
        for name, parameter in one.named_parameters():
            assert (parameter.grad is None) == (truth[name].grad is None)
            assert parameter.grad is None or torch.equal(parameter.grad, truth[name].grad)
    assert all(map(torch.equal, model.buffers(), twin.buffers()))


def test_dropout_inside_a_block_is_drawn_again_as_it_was() -> None:
    block, x = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)), torch.randn(5, 4)
    left = run_chain((block, nn.Linear(64, 64)), x)
    torch.rand(100)  # the random state goes on between the two passes
    after = torch.get_rng_state()
    left.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)


class Named(nn.Module):
    """A model that is no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Overridden(nn.Sequential):
    """A Sequential that is not the composition of its children."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Holding(Named):
    """A model with a module of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(nn.Linear(4, 4))


@pytest.mark.parametrize("model", [Named(), Overridden(nn.Linear(4, 4)), Holding()])
def test_a_model_that_is_no_chain_is_refused_with_a_remedy(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"{type(model).__name__} is not known to be one: give it a method chain\(\)"):
        split_gradients(model, torch.sum, torch.randn(5, 4), checkpointing=True)


@pytest.mark.parametrize("net", ["conv", "residual", "instance"])
def test_a_chain_is_held_against_the_forward_pass(net: str) -> None:
    """With dropout and BatchNorm in training mode, and without a trace of it."""
    model, x = make(net), images()
    buffers, state = [each.clone() for each in model.buffers()], torch.get_rng_state()
    blocks = find_chain(model)
    require_composition(model, blocks, x)
    with pytest.raises(ValueError, match=r"differ by [\d.e+-]+ of the largest feature"):
        require_composition(model, (*blocks, nn.Softplus()), x)
    with pytest.raises(ValueError, match=r"differ by inf of the largest feature \(shapes .*, \(4, 10\)\)"):
        require_composition(model, blocks[:-1], x)
    assert all(map(torch.equal, model.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_empty_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequential has none"):
        find_chain(nn.Sequential())


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.5, inplace=True), nn.ELU(inplace=True)])
def test_a_block_that_writes_into_its_input_is_refused(activation: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 2))
    with pytest.raises(ValueError, match=f"{type(activation).__name__} writes into it"):
        split_gradients(model, torch.sum, torch.randn(5, 4), checkpointing=True)
