"""The predicted peak of a training step beside the one that torch's profiler counts."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from engine.fewshot.backbones import make_backbone
from engine.fewshot.cosine_transformer import FewShotTransformer
from engine.fewshot.episode_loss import EpisodeLoss
from engine.fewshot.regulariser import VicWeights
from engine.training import training_peak
from engine.training.batch_statistics import BatchNormMode
from engine.training.mixed_precision import TrainingPrecision
from engine.training.split_gradients import split_gradients
from engine.training.training_peak import PARTS, StepMemory, TrainingPeak, TrainingStep
from engine.training.ways import Way, exact_ways
from tests.memory_profile import peak_bytes

MIB = 2**20
AdamW = partial(torch.optim.AdamW, foreach=False)
SHOTS, QUERIES = 2, 3
IMAGES = 5 * (SHOTS + QUERIES)


def autocast_terms(loss: EpisodeLoss, dtype: torch.dtype, features: Tensor) -> Iterator[Tensor]:
    """The terms of a loss, each computed under autocast."""
    terms = loss(features)
    while True:
        with TrainingPrecision(compute_dtype=dtype).autocast(features.device):
            term = next(terms, None)
        if term is None:
            return
        yield term
        del term


def episode_step(
    name: str = "Conv4",
    size: int = 32,
    *,
    device: str = "meta",
    stem: str = "imagenet",
    shots: int = SHOTS,
    queries: int = QUERIES,
    dtype: torch.dtype = torch.float32,
    batch_norm: BatchNormMode = "frozen",
) -> TrainingStep:
    """One ProFOCT episode of five classes with features as vectors of the whole map."""
    with torch.device(device):
        model = make_backbone(name, stem=stem, pool="flatten")  # type: ignore[arg-type]
        head = FewShotTransformer(model.feature_shape(size)[0], shots)
    loss = EpisodeLoss(head=head, n_way=5, k_shot=shots, n_query=queries, vic=(VicWeights(), 1.0))
    return TrainingStep(
        model=model,
        loss=loss if dtype == torch.float32 else partial(autocast_terms, loss, dtype),
        head=head,
        images=5 * (shots + queries),
        image_shape=(3, size, size),
        optimiser=AdamW,
        batch_norm=batch_norm,
    )


def measured(step: TrainingStep, way: Way) -> int:
    """Bytes at the peak of a real step: those that stand before it, and the most that the profiler counts beyond."""
    parameters = [each for module in step.modules for each in module.parameters()]
    optimiser = step.optimiser(parameters)
    for each in parameters:
        each.grad = torch.zeros_like(each)
    optimiser.step()
    optimiser.zero_grad()
    images = torch.randn(step.images, *step.image_shape, dtype=step.dtype)

    def work() -> None:
        split_gradients(
            step.model,
            step.loss,
            images,
            chunk=way.chunk,
            batch_norm=step.batch_norm,
            checkpointing=way.checkpointing,
            precision=TrainingPrecision(compute_dtype=way.compute_dtype),
        )
        optimiser.step()

    states = [each for state in optimiser.state.values() for each in state.values()]
    buffers = [each for module in step.modules for each in module.buffers()]
    return sum(each.nbytes for each in (images, *parameters, *buffers, *states)) + peak_bytes(work)


@functools.cache
def memory_of_one() -> StepMemory:
    """The memory of the episode without further options, which is traced once for all tests."""
    return StepMemory(episode_step())


def predicted(step: TrainingStep, way: Way) -> TrainingPeak:
    return StepMemory(step).peak(way)


@pytest.mark.part(of=32, by=("way.compute_dtype",))
@pytest.mark.parametrize(
    "way",
    [
        Way(),
        Way(chunk=7),
        Way(checkpointing=True),
        Way(chunk=7, checkpointing=True),
        Way(compute_dtype=torch.bfloat16),
        Way(chunk=7, checkpointing=True, compute_dtype=torch.bfloat16),
    ],
    ids=lambda way: way.described,
)
def test_the_peak_is_that_of_a_real_step(way: Way) -> None:
    real = measured(episode_step(device="cpu", dtype=way.compute_dtype), way)
    peak = predicted(episode_step(dtype=way.compute_dtype), way)

    assert 0.8 <= peak.size_bytes / real <= 1.1


def test_the_peak_is_that_of_a_real_step_with_statistics_of_the_whole_batch() -> None:
    way = Way(checkpointing=True)
    real = measured(episode_step(device="cpu", batch_norm="whole"), way)

    assert 0.8 <= predicted(episode_step(batch_norm="whole"), way).size_bytes / real <= 1.1


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("way", [Way(), Way(chunk=7), Way(checkpointing=True)], ids=lambda way: way.described)
def test_the_peak_in_float64_has_the_columns_of_convolutions(way: Way) -> None:
    def doubled(device: str) -> TrainingStep:
        step = episode_step(device=device)
        for module in step.modules:
            module.double()
        return replace(step, dtype=torch.float64)

    real, peak = measured(doubled("cpu"), way), predicted(doubled("meta"), way)
    elsewhere = predicted(replace(doubled("meta"), device=torch.device("cuda")), way)

    assert 0.95 <= peak.size_bytes / real <= 1.05
    assert elsewhere.size_bytes <= peak.size_bytes
    assert training_peak.WORKSPACE not in elsewhere.parts


def test_slices_lower_the_activations_by_as_much() -> None:
    memory = memory_of_one()
    undivided, halves, quarters = (memory.peak(Way(chunk=each)).parts[training_peak.KEPT] for each in (None, 13, 7))

    assert halves <= 0.55 * undivided
    assert quarters <= 0.35 * undivided


def test_checkpointing_holds_what_is_between_blocks_and_the_inside_of_one() -> None:
    memory = StepMemory(episode_step("ResNet18", 64))
    whole, blocks = (memory.peak(Way(checkpointing=each)).parts[training_peak.KEPT] for each in (False, True))

    assert blocks <= 0.5 * whole


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("chunk", [1, 12])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lines_through_small_chunks_are_the_run_itself(chunk: int, *, checkpointing: bool) -> None:
    step, way = episode_step(), Way(chunk=chunk, checkpointing=checkpointing)
    drawn, run = StepMemory(step)._of_chunk(way), training_peak._trace(step, way)

    assert drawn == run


def test_parts_are_those_that_shapes_give() -> None:
    step = episode_step()
    parameters = sum(each.nbytes for module in step.modules for each in module.parameters())
    buffers = sum(each.nbytes for module in step.modules for each in module.buffers())
    count = sum(1 for module in step.modules for _ in module.parameters())
    parts = memory_of_one().peak(Way(chunk=5)).parts

    assert set(parts) <= set(PARTS)
    assert parts["weights"] == parameters + buffers
    assert parts["optimiser moments"] == 2 * parameters + 4 * count
    assert parts["images"] == 4 * IMAGES * 3 * 32 * 32
    assert parts["gradients"] <= parameters
    # features of all images, and as many cotangents
    assert parts["features and cotangents"] == 2 * 4 * IMAGES * 64 * 2 * 2


@pytest.mark.part(of=12, by=("moments",))
@pytest.mark.parametrize(
    ("optimiser", "moments"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False), 1),
        (partial(torch.optim.SGD, lr=0.1, foreach=False), 0),
        (partial(torch.optim.Adam, foreach=False), 2),
    ],
)
def test_moments_are_those_of_the_optimiser(
    optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer], moments: int
) -> None:
    model = nn.Linear(64, 32, bias=False, device="meta")
    step = TrainingStep(model=model, loss=lambda z: z.square().sum(), images=8, image_shape=(64,), optimiser=optimiser)

    found = predicted(step, Way()).parts.get("optimiser moments", 0)
    assert 0 <= found - moments * model.weight.nbytes <= 4


def test_updating_all_parameters_at_once_holds_as_much_as_all_of_them() -> None:
    def update(*, foreach: bool) -> int:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(10)))
        optimiser = partial(torch.optim.AdamW, foreach=foreach)
        step = TrainingStep(model=model, loss=torch.sum, images=2, image_shape=(64,), optimiser=optimiser)
        return predicted(step, Way()).parts.get(training_peak.UPDATE, 0)

    weight = 4 * 64 * 64
    assert update(foreach=True) >= 10 * weight
    assert update(foreach=False) <= 4 * weight


def test_modules_are_left_as_they_were() -> None:
    step = episode_step()
    predicted(step, Way(chunk=5, checkpointing=True, compute_dtype=torch.float32))

    for module in (each for own in step.modules for each in own.modules()):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in (each for own in step.modules for each in own.parameters()):
        assert parameter.grad is None
        assert not parameter._post_accumulate_grad_hooks


# FSCT with AdamW, five classes of 5 + 16 images at 224, in MiB, found with fake tensors of another device
@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize(
    ("name", "stem", "peaks"),
    [
        ("ResNet18", "imagenet", {None: 3293}),
        ("ResNet34", "imagenet", {None: 4413, 35: 2298, 15: 1691, 5: 1388}),
        ("ResNet34", "feti", {None: 10935}),
    ],
)
@pytest.mark.part(of=2, law="peaks are those that were found another way")
def test_peaks_at_224_are_those_that_were_found_another_way(name: str, stem: str, peaks: dict[int | None, int]) -> None:
    memory = StepMemory(episode_step(name, 224, stem=stem, shots=5, queries=16))

    for chunk, known in peaks.items():
        assert memory.peak(Way(chunk=chunk)).size_bytes / MIB == pytest.approx(known, rel=0.02)


@pytest.mark.part(of=2, law="peaks are those that were found another way")
def test_bfloat16_at_224_is_what_was_found_another_way() -> None:
    step = episode_step("ResNet34", 224, shots=5, queries=16, dtype=torch.bfloat16)

    peak = predicted(step, Way(compute_dtype=torch.bfloat16))
    assert peak.size_bytes / MIB == pytest.approx(2971, rel=0.02)
    assert peak.parts["AMP copies"] > 0


def test_a_chunk_that_is_not_taken_saves_nothing() -> None:
    coupled, uncoupled = StepMemory(episode_step(batch_norm="whole")), memory_of_one()

    assert coupled.peak(Way(chunk=5)).parts == coupled.peak(Way()).parts
    assert uncoupled.peak(Way(chunk=IMAGES)).parts == uncoupled.peak(Way()).parts


def test_every_way_of_a_step_has_a_peak_and_the_smallest_is_in_small_chunks() -> None:
    memory = memory_of_one()
    peaks = {way: memory.peak(way).size_bytes for way in exact_ways(IMAGES, coupled=False, has_chain=True)}

    assert min(peaks, key=peaks.__getitem__).chunk == 1
    # a block's random state is kept where it is computed again, and the first block of a Conv net is the peak of all
    assert peaks[Way()] >= 0.99 * max(peaks.values())
