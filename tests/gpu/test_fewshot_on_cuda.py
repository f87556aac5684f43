"""Few-shot training on a GPU: exact gradients in slices, skipped steps of float16, and peaks as the plan predicts."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks.fewshot_cases.episode_step import EpisodeSize
from benchmarks.fewshot_cases.step_peaks import PeakCase, measure, predict
from engine.fewshot.backbones import make_backbone
from engine.fewshot.episode_loss import EpisodeLoss
from engine.fewshot.heads import make_head
from engine.fewshot.regulariser import VicWeights
from engine.training.batch_statistics import BatchNormMode, freeze_statistics
from engine.training.mixed_precision import choose_precision
from engine.training.optimiser_step import OptimiserStep, make_optimiser
from engine.training.split_gradients import split_gradients
from engine.training.ways import Way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")
WAYS, SHOTS, QUERIES = 3, 2, 3


def episode(device: torch.device, *, on_attention: bool = False) -> tuple[nn.Module, EpisodeLoss, Tensor]:
    """A Conv4, the loss of ProFOCT and the images of an episode, in float64, the same on every device."""
    torch.manual_seed(0)
    model = make_backbone("Conv4", width=8, channels=1, pool="flatten")
    head = make_head("ProFOCT_cosine", k_shot=SHOTS, feature_shape=model.feature_shape(32), hidden=16, head_dim=8)
    images = torch.rand(WAYS * (SHOTS + QUERIES), 1, 32, 32, dtype=torch.float64)
    loss = EpisodeLoss(
        head=head.to(device, torch.float64),
        n_way=WAYS,
        k_shot=SHOTS,
        n_query=QUERIES,
        vic=(VicWeights(), 1.0),
        on_attention=on_attention,
        slices=2,
    )
    with_dropout = nn.Sequential(*model.chain(), nn.Dropout(0.25)).to(device, torch.float64)
    return with_dropout, loss, images.to(device)


def undivided_gradients(model: nn.Module, loss: EpisodeLoss, images: Tensor, way: Way, batch_norm: str) -> Tensor:
    """All gradients by plain autograd with the graph of all images, whose masks are drawn chunk by chunk."""
    torch.manual_seed(1)
    with freeze_statistics(model, wanted=batch_norm == "frozen"):
        features = torch.cat([model(piece) for piece in torch.split(images, way.chunk or len(images))])
        torch.stack(list(loss(features))).sum().backward()
    return taken_gradients(model, loss)


def split(model: nn.Module, loss: EpisodeLoss, images: Tensor, way: Way, batch_norm: BatchNormMode) -> Tensor:
    torch.manual_seed(1)
    split_gradients(model, loss, images, chunk=way.chunk, batch_norm=batch_norm, checkpointing=way.checkpointing)
    return taken_gradients(model, loss)


def taken_gradients(model: nn.Module, loss: EpisodeLoss) -> Tensor:
    """All gradients as one vector, which are let go of."""
    parameters = [*model.parameters(), *loss.head.parameters()]
    vector = torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])
    for parameter in parameters:
        parameter.grad = None
    return vector


@pytest.mark.parametrize("on_attention", [False, True])
@pytest.mark.parametrize(
    ("way", "batch_norm"),
    [
        (Way(checkpointing=True), "whole"),
        (Way(checkpointing=True), "frozen"),
        (Way(chunk=4), "frozen"),
        (Way(chunk=4, checkpointing=True), "frozen"),
        (Way(chunk=1), "frozen"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.described,
)
def test_gradients_are_those_of_the_undivided_episode(
    way: Way, batch_norm: BatchNormMode, *, on_attention: bool
) -> None:
    model, loss, images = episode(CUDA, on_attention=on_attention)
    wanted = undivided_gradients(model, loss, images, way, batch_norm)
    found = split(model, loss, images, way, batch_norm)
    assert found.device == images.device
    assert float((found - wanted).abs().max()) <= 1e-10 * float(wanted.abs().max())


def test_gradients_are_those_of_the_host() -> None:
    found = []
    for device in (CUDA, torch.device("cpu")):
        model, loss, images = episode(device)
        found.append(split(model.eval(), loss, images, Way(chunk=4), "frozen").cpu())
    assert float((found[0] - found[1]).abs().max()) <= 1e-10 * float(found[1].abs().max())


def test_float16_skips_a_step_that_overflows_and_counts_it() -> None:
    torch.manual_seed(0)
    precision = choose_precision(True, CUDA, "fp16")
    assert precision.scaler is not None
    model = make_backbone("Conv4", width=8, channels=1).to(CUDA)
    images = torch.rand(12, 1, 32, 32, device=CUDA)
    parameters = list(model.parameters())
    step = OptimiserStep(make_optimiser("SGD", parameters, learning_rate=1e-3), precision)
    before = [each.detach().clone() for each in parameters]

    def take(loss_scale: float) -> bool:
        loss = split_gradients(
            model,
            lambda features: loss_scale * features.float().square().sum(),
            images,
            chunk=5,
            batch_norm="frozen",
            precision=precision,
        )
        return step.take(loss)

    assert not take(1e8)
    assert step.skipped == 1
    assert all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))
    assert all(each.grad is None for each in parameters)
    taken = [take(1e-3) for _ in range(8)]
    assert taken[-1]
    assert step.skipped == 1 + taken.count(False)
    assert not all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        PeakCase(backbone="Conv4", size=EpisodeSize()),
        PeakCase(backbone="ResNet18", size=EpisodeSize(), chunk=15),
        PeakCase(backbone="ResNet18", size=EpisodeSize(), checkpointing=True),
    ],
    ids=lambda case: case.name,
)
def test_the_peak_is_as_predicted(case: PeakCase) -> None:
    """By ``max_memory_allocated``, in which cuDNN's workspaces count."""
    measured = measure(case, CUDA)
    assert 0.8 <= predict(case, CUDA) / (measured["held"] + measured["allocated"]) <= 1.1
