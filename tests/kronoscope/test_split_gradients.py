"""``kronoscope.local.split_gradients``: a step of any model and loss in less memory, and what it refuses."""

import copy
import doctest
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.model.pass_peak import StorageEvents
from kronoscope import local
from kronoscope.local import split_gradients


class Coupled(nn.Module):
    """A layer that takes a mean over the batch, which no list of layers knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Block(nn.Sequential):
    """Three times a convolution, a norm, an activation."""

    def __init__(self) -> None:
        parts = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        super().__init__(*(copy.deepcopy(part) for _ in range(3) for part in parts))


class Forgetful(nn.Module):
    """A model whose chain lacks its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def chain(self) -> tuple[nn.Module, ...]:
        return (self.block,)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(5)), nn.Flatten()).double()


def images(count: int = 24) -> Tensor:
    return torch.randn(count, 4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def pairs(features: Tensor) -> Tensor:
    """A loss of all pairs of features."""
    return (features @ features.T).logsumexp(1).mean() / features.shape[1]


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters()])


@pytest.mark.parametrize("batch_norm", ["whole", "frozen"])
def test_a_step_has_the_undivided_gradient_in_half_the_memory(batch_norm: Any) -> None:
    model, x = network(), images()
    twin = copy.deepcopy(model)
    for module in twin.modules():
        module.training &= not (batch_norm == "frozen" and isinstance(module, nn.BatchNorm2d))
    peaks = []
    for made, options in ((twin, {}), (model, {"chunk": 6, "batch_norm": batch_norm})):
        events = StorageEvents()
        with events.noted():
            found = split_gradients(made, pairs, x, **options)
        peaks.append(max(events.held))
        assert not found.requires_grad
    assert (gradients(model) - gradients(twin)).abs().max() <= 1e-10 * gradients(twin).abs().max()
    assert all(map(torch.equal, model.buffers(), twin.buffers()))
    assert peaks[1] <= 0.55 * peaks[0]


def test_the_example_runs() -> None:
    examples = doctest.DocTestFinder(recurse=False).find(
        local.split_gradients, "split_gradients", globs={"torch": torch, "nn": nn, "split_gradients": split_gradients}
    )
    assert examples
    assert all(doctest.DocTestRunner().run(each).failed == 0 and each.examples for each in examples)


@pytest.mark.parametrize(
    ("model", "options", "error", "sentence"),
    [
        (
            nn.Sequential(Coupled(), nn.Flatten()),
            {},
            ValueError,
            r"change by 0\.\d+ of the largest with the other inputs",
        ),
        (network(), {"batch_norm": "per_chunk"}, ValueError, "statistics of each chunk make another function"),
        (nn.ModuleList([Block()])[0:1], {"batch_norm": "per_chunk"}, ValueError, "statistics of each chunk"),
        (Forgetful().double(), {}, ValueError, r"for Forgetful they differ by [\d.e+]+ of the largest feature"),
        (network(), {"amp": "fp16"}, ValueError, "fp16 must run on a CUDA device"),
        (network(), {"amp": "fp8"}, ValueError, "must be one of auto, bf16, fp16"),
        (network(), {"chunk": 0}, ValueError, "chunk must be at least 1"),
        (nn.Linear, {}, TypeError, "give a torch.nn.Module"),
    ],
)
def test_what_would_be_another_gradient_is_refused(
    model: Any, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        split_gradients(model, torch.sum, images(), **{"chunk": 6, **options})
    assert not isinstance(model, nn.Module) or all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        *(({"chunk": value}, r"`chunk` must be a whole number, or None \(got") for value in (
            float("nan"), float("inf"), True, "x", [], 1.5)),
        ({"chunk": -1}, r"chunk must be at least 1 \(got -1\)"),
        ({"check": "foo"}, r"`check` must be True or False \(got 'foo'\)"),
        ({"scaler": 2.0}, r"`scaler` must be GradScaler, or None \(got 2.0\)"),
        ({"inputs": [1.0]}, r"inputs must be a tensor of shape \(N, …\) \(got list\); give one"),
        ({"inputs": torch.tensor(3.0)}, r"inputs must be a tensor of shape \(N, …\) \(got one without dimensions\)"),
        ({"inputs": None}, r"\(got NoneType\)"),
        ({"loss_of_features": None}, r"`loss_of_features` is NoneType; give a function of \(features\)"),
        ({"loss_of_features": lambda: 0}, r"`loss_of_features` takes other arguments \(.*; give a function of"),
        ({"loss_of_features": lambda z: torch.tensor(3.0)}, r"a loss must have a graph, .* \(got 3 without one\)"),
        ({"loss_of_features": lambda z: [z.detach().sum()] * 2, "chunk": None}, "a loss must have a graph"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("check", [True, False])
def test_an_argument_that_cannot_be_is_refused_by_name(changes: dict[str, Any], sentence: str, check: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 2)).double()
    given = {"model": model, "loss_of_features": torch.sum, "inputs": images(), "chunk": 6, "check": check} | changes
    with pytest.raises(EngineError, match=sentence):
        split_gradients(**given)
    assert all(each.grad is None for each in model.parameters())


def test_a_check_that_is_left_out_runs_no_further_pass() -> None:
    model, passes = nn.Sequential(nn.Flatten(), nn.Linear(144, 2)).double(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    for check, expected in ((False, 2 * 4), (True, 2 * 4 + 4)):
        passes.clear()
        split_gradients(model, torch.sum, images(), chunk=6, check=check)
        assert len(passes) == expected


@pytest.mark.parametrize("asked", ["auto", "bf16"])
def test_a_device_without_16_bits_computes_at_full_width_and_says_so(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.mixed_precision._has_bfloat16", lambda device: False)
    model, seen = network().float(), []

    def loss(features: Tensor) -> Tensor:
        seen.append(features.dtype)
        return pairs(features.float())

    with pytest.warns(UserWarning, match="computed at full width: this CPU has no bfloat16 units"):
        split_gradients(model, loss, images().float(), amp=asked)
    monkeypatch.setattr("engine.model.mixed_precision._has_bfloat16", lambda device: True)
    split_gradients(model, loss, images().float(), amp=asked)
    assert seen == [torch.float32, torch.bfloat16]


def test_a_scaler_scales_in_any_precision() -> None:
    """The scaler's own step divides by the scale whatever the features were computed in."""
    model = network()
    split_gradients(model, pairs, images())
    plain = gradients(model)
    model.zero_grad()
    split_gradients(model, pairs, images(), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**7))
    assert torch.equal(gradients(model), 2.0**7 * plain)
