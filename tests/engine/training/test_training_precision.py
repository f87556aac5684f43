"""Precision of training: what is chosen for a device, what it changes, and that a scale changes nothing."""

import copy

import pytest
import torch
from torch import Tensor, nn

from engine.training.mixed_precision import TrainingPrecision, choose_precision
from engine.training.split_gradients import split_gradients
from tests.engine.training.nets import Head, conv_net, images

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("asked", ["auto", "bf16"])
def test_a_cpu_takes_bfloat16_where_it_has_units(units: bool, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.mixed_precision._has_bfloat16", lambda device: units)
    chosen = choose_precision(True, CPU, asked)
    assert chosen.compute_dtype == (torch.bfloat16 if units else torch.float32)
    assert chosen.reason == (None if units else "this CPU has no bfloat16 units")
    assert chosen.scaler is None


def test_without_amp_features_are_computed_at_full_width() -> None:
    assert choose_precision(False, CPU) == TrainingPrecision() == choose_precision(False, CUDA, "fp16")


@pytest.mark.parametrize(
    ("asked", "chosen"), [("auto", torch.float16), ("bf16", torch.float32), ("fp16", torch.float16)]
)
def test_a_cuda_device_without_bfloat16_scales_float16(
    asked: str, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.mixed_precision._has_bfloat16", lambda device: False)
    made = choose_precision(True, CUDA, asked)
    assert made.compute_dtype == chosen
    assert made.reason == (None if asked == "fp16" else "this device has no bfloat16 units")
    assert (made.scaler is not None) == (chosen == torch.float16 and torch.cuda.is_available())


@pytest.mark.parametrize(
    ("asked", "sentence"), [("fp16", "must run on a CUDA device"), ("fp8", r"must be one of .*'fp8'")]
)
def test_what_a_cpu_cannot_do_is_refused_by_name(asked: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        choose_precision(True, CPU, asked)


@pytest.mark.parametrize("ambient", [False, True])
@pytest.mark.parametrize("options", [{}, {"chunk": 4, "batch_norm": "frozen"}, {"checkpointing": True}])
def test_bfloat16_features_have_float32_gradients_within_their_rounding(
    ambient: bool, options: dict[str, object]
) -> None:
    """Also under a caller's own autocast, whose cached casts of weights made without a graph must not be taken."""
    torch.manual_seed(0)
    model, x, dtypes = conv_net().float(), images().float(), []
    twin = copy.deepcopy(model)

    def loss(z: Tensor) -> Tensor:
        dtypes.append(z.dtype)
        return z.float().square().mean()

    def run(of: nn.Module, precision: TrainingPrecision | None) -> list[Tensor]:
        torch.manual_seed(1)
        split_gradients(of, loss, x, precision=precision, **options)
        return [each.grad for each in of.parameters()]

    narrow = TrainingPrecision(compute_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
        found = run(model, None if ambient else narrow)
    truth = run(twin, None)
    assert dtypes == [torch.bfloat16, torch.float32]
    largest = max(each.abs().max() for each in truth)
    differences = [(one - other).abs().max() / largest for one, other in zip(found, truth, strict=True)]
    assert 1e-5 < max(differences) < 2.0**-8 * 20


def test_a_scale_multiplies_every_gradient_once_in_every_way() -> None:
    torch.manual_seed(0)
    model, head, x = conv_net().double(), Head(), images()
    for loss in (head.covariance, head.terms):
        for options in ({}, {"chunk": 4, "batch_norm": "frozen"}, {"checkpointing": True}):
            found = []
            for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**9)):
                torch.manual_seed(1)
                precision = TrainingPrecision(scaler=scaler)
                value = split_gradients(model, loss, x, precision=precision, **options)
                found.append((value, [each.grad for part in (model, head) for each in part.parameters()]))
                model.zero_grad()
                head.zero_grad()
            (value, plain), (scaled_value, scaled) = found
            assert value == scaled_value
            for one, other in zip(plain, scaled, strict=True):
                assert one is None if other is None else torch.equal(2.0**9 * one, other)
