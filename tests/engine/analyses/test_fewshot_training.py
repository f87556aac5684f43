"""Few-shot training: the gradient of the undivided episode in every exact way, resumption, refusals and the plan."""

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from catalog.analyses.analysis import LayerResult
from catalog.analyses.fewshot_training import FewshotTrainingParams, FewshotTrainingSummary, Vic
from catalog.requests.memory import Memory
from engine.analyses import fewshot_training
from engine.analyses.costs.fewshot_training import TrainingPlans, smallest_budgets
from engine.analyses.fewshot import training_run
from engine.analyses.fewshot.fewshot_model import Episodes, make_model, weights_digest
from engine.analyses.fewshot.training_run import EpisodeTest
from engine.analyses.fewshot_training import FewshotTraining, estimate_training
from engine.collection import checkpoints
from engine.errors import BudgetExceeded, NonFiniteLoss, OutOfMemory, StopRequested, UsageError
from engine.fewshot.strokes import draw
from engine.image_data import SPLITS, ImageData, Split
from engine.memory.budget import MemoryBudget
from engine.memory.guard import Guard
from engine.model.pass_peak import StorageEvents
from engine.model.state.generators import set_generators
from engine.training.mixed_precision import TrainingPrecision
from engine.workspace import JobOptions, Machine, ModelInputs, Ports, Resume, Workspace
from tests.oracles import MemoryArtifacts

KIND = "fewshot_training"
SIZE = 16
FLOAT64 = {"dtype": "float64", "use_amp": False}
SMALL: dict[str, Any] = {
    "backbone": "Conv4",
    "width": 4,
    "n_way": 3,
    "k_shot": 2,
    "n_query": 3,
    "n_episode": 2,
    "num_epoch": 2,
    "test_iter": 2,
    "learning_rate": 1e-2,
    "gradient_accumulation_steps": 1,
    **FLOAT64,
}
BRIEF: dict[str, Any] = {"num_epoch": 1, "n_episode": 1, "test_iter": 2}
"""Options of a training with numbers that do not matter."""


strokes = functools.cache(draw)
"""The images, once for all runs: a fifth of the time of one."""


class Drawn:
    """Stroke images of one split."""

    def __init__(self, split: Split, classes: int, per_class: int, channels: int = 1) -> None:
        self.split, self.shape, self.held_bytes = split, (channels, SIZE, SIZE), 0
        self.names = [f"{split} {place}" for place in range(classes)]
        self.sizes = [per_class] * classes

    def read(self, place: int, images: tuple[int, ...]) -> Tensor:
        return strokes(self.split, place, images, 0, image_size=SIZE, channels=self.shape[0])


TRACED: dict[str, tuple[Any, Any]] = {}
"""Memories of steps and counts of passes, by all that they depend on."""
UNTRACED: dict[str, Any] = {
    "seed": 0,
    "num_epoch": 1,
    "n_episode": 1,
    "test_iter": 2,
    "learning_rate": 1.0,
    "weights": None,
}


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal steps are traced once for all runs, whatever is drawn and however often: more than half of a run's time."""
    begin = TrainingPlans.__init__

    def shared(self: TrainingPlans, **given: Any) -> None:
        begin(self, **given)
        place = repr((replace(self.params, **UNTRACED), self.shape, self.workspace.machine.device))
        self._memories, self._counts = TRACED.setdefault(place, (self._memories, self._counts))

    monkeypatch.setattr(TrainingPlans, "__init__", shared)


def images(classes: int = 5, per_class: int = 6, **others: Any) -> ImageData:
    return ImageData(splits={split: Drawn(split, classes, per_class) for split in SPLITS}, sha256="0", **others)


def space(data: ImageData | None = None, budget: MemoryBudget | None = None, **options: Any) -> Workspace:
    params = FewshotTrainingParams(**(SMALL | options))
    budget = budget or MemoryBudget.unlimited()
    return Workspace(
        inputs=ModelInputs(images=data or images()),
        ports=Ports(artifacts=MemoryArtifacts()),
        options=JobOptions(kinds=(KIND,), params={KIND: params}, memory=Memory(), decomposition="none"),
        machine=Machine(
            budget=budget, guard=Guard(budget=budget, device=torch.device("cpu"), log=lambda level, message: None)
        ),
    )


def run(made: Workspace) -> tuple[list[LayerResult], FewshotTrainingSummary]:
    rows: list[LayerResult] = []
    generator = FewshotTraining(made.options.of(KIND), made).rows()
    while True:
        try:
            rows.append(next(generator))
        except StopIteration as end:
            return rows, end.value


@functools.cache
def trained_once() -> tuple[Workspace, FewshotTrainingSummary]:
    """A training by the options above, once for all tests that read what it leaves."""
    made = space()
    return made, run(made)[1]


def weights(made: Workspace) -> dict[str, Tensor]:
    assert isinstance(made.ports.artifacts, MemoryArtifacts)
    return made.ports.artifacts.tensors["model.safetensors"]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


CASES = [
    ({"method": "ProtoNet"}, "frozen"),
    ({"method": "CTX_softmax"}, "whole"),
    ({"method": "FSCT_cosine", "pool": "flatten"}, "frozen"),
    ({"method": "ProFOCT_cosine", "vic": Vic(alpha=2.0, gamma=3.0)}, "whole"),
    ({"method": "ProFOCT_cosine", "use_vic_on_attention": True}, "frozen"),
]


@pytest.mark.part(of=32, by=("batch_norm",))
@pytest.mark.parametrize(("method", "batch_norm"), CASES, ids=[each["method"] for each, _ in CASES])
def test_slices_train_to_the_weights_of_the_undivided_episode(method: dict[str, Any], batch_norm: str) -> None:
    # Adam would blow the rounding of a gradient that is 0 up to a step: that of a bias just before a BatchNorm
    same: dict[str, Any] = {"batch_norm": batch_norm, "optimiser": "SGD", "num_epoch": 1, **method}
    undivided, sliced = (space(gradient_accumulation_steps=steps, **same) for steps in (1, 4))
    truth, found = run(undivided)[1], run(sliced)[1]
    assert distance(weights(undivided), weights(sliced)) <= 1e-10
    assert truth.slices == 1
    assert found.slices == (1 if batch_norm == "whole" else 4)
    assert found.head_slices == (1 if "use_vic_on_attention" in method else 4)
    assert [each.accuracy for each in found.accuracies] == [each.accuracy for each in truth.accuracies]


@pytest.mark.part(of=3, law="a training holds to its plan and ends with the same bits")
def test_blocks_that_are_computed_again_train_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain, _), again = trained_once(), space()

    def checkpointed(plans: TrainingPlans) -> Iterator[Any]:
        return (way for way in ways(plans) if way.way.checkpointing)

    ways = TrainingPlans.ways
    monkeypatch.setattr(TrainingPlans, "ways", checkpointed)
    summary = run(again)[1]
    assert summary.checkpointing
    assert distance(weights(plain), weights(again)) == 0


@pytest.mark.part(of=3, law="a training holds to its plan and ends with the same bits")
def test_a_budget_is_met_by_smaller_slices_and_never_slower_with_more() -> None:
    plans = TrainingPlans.of(space(images(per_class=10), batch_norm="frozen", width=64, n_query=8, pool="flatten"))
    ways = list(plans.ways())
    # the first that fits is the fastest, of images and head together: a larger budget only adds earlier ones
    costs = [way.way.relative_cost(plans.params.images) for way in ways]
    assert costs == sorted(costs)
    assert {way.head_slices for way in ways} == {1, 8}
    peaks = [plans.plan(way).peak_bytes("host") for way in ways]
    unlimited = MemoryBudget.unlimited()
    before = None
    for host in range(min(peaks), max(peaks) + 2**20, (max(peaks) - min(peaks)) // 6):
        plan = plans.chosen(MemoryBudget(device_bytes=unlimited.device_bytes, host_bytes=host))
        assert plan.peak_bytes("host") <= host
        seconds = plan.seconds["training"]
        assert before is None or seconds <= before
        before = seconds
    enough = smallest_budgets(plans, unlimited)["host"]
    assert enough is not None
    assert min(peaks) <= enough.size_bytes <= 1.1 * min(peaks)
    tight = MemoryBudget(device_bytes=unlimited.device_bytes, host_bytes=min(peaks) - 2**21)
    with pytest.raises(BudgetExceeded, match=f"raise `memory.host` to {-(-enough.size_bytes // 2**20)}MiB"):
        plans.chosen(tight).require(tight, {"host": enough})


# one whose best epoch may lie before the kill
KILLED: dict[str, Any] = {
    "num_epoch": 3, "n_episode": 4, "test_iter": 3, "method": "ProFOCT_cosine", "optimiser": "Adam",
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Workspace, tuple[list[LayerResult], FewshotTrainingSummary]]:
    truth = space(**KILLED)
    return truth, run(truth)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("stop_after", [9, 1, 5, 14])
@pytest.mark.part(of=3, law="a training holds to its plan and ends with the same bits")
def test_a_killed_training_ends_with_the_same_bits(
    stop_after: int, undisturbed: tuple[Workspace, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    truth, expected = undisturbed
    scratch = MemoryArtifacts()
    first = space(**KILLED)
    first.ports.scratch, first.resume.checkpoint_seconds = scratch, 1e-9

    def stop(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "training" and done >= stop_after:
            raise StopRequested

    first.ports.report = stop
    with pytest.raises(StopRequested):
        run(first)
    again = space(**KILLED)
    again.ports.scratch, again.resume.checkpoint_seconds = copy.copy(scratch), 1e-9
    lines: list[str] = []
    again.ports.log = lambda level, message: lines.append(message)
    rows, summary = run(again)
    assert any("the training resumed after" in line for line in lines) == (stop_after > 1)
    assert distance(weights(truth), weights(again)) == 0
    assert (summary.losses, summary.vic, summary.best_epoch) == (
        expected[1].losses, expected[1].vic, expected[1].best_epoch,
    )  # fmt: skip
    assert [row.metrics for row in rows] == [row.metrics for row in expected[0]]


def test_a_checkpoint_of_other_images_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    first = space(**BRIEF)
    first.ports.scratch, first.resume.checkpoint_seconds = MemoryArtifacts(), 1e-9
    run(first)
    lines: list[str] = []
    other = space(ImageData(splits=images().splits, sha256="1"), **BRIEF)
    other.ports.scratch, other.resume.checkpoint_seconds = first.ports.scratch, 1e-9
    other.ports.log = lambda level, message: lines.append(message)
    run(other)
    assert any("it was made under another images" in line for line in lines)


@pytest.mark.part(of=3, law="a training holds to its plan and ends with the same bits")
def test_a_checkpoint_of_other_weights_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of weights that is replaced under its name begins another training."""
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    other = space(seed=2, **BRIEF)
    run(other)
    lines: list[str] = []
    kept = MemoryArtifacts()
    for each in (trained_once()[0], other):
        made = space(images(weights=weights(each)), weights="w", **BRIEF)
        made.ports.scratch, made.resume.checkpoint_seconds = kept, 1e-9
        made.ports.log = lambda level, message: lines.append(message)
        run(made)
    assert any("it was made under another weights" in line for line in lines)


@pytest.mark.part(of=3, law="a training holds to its plan and ends with the same bits")
def test_every_seed_has_weights_and_draws_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator of the host reads 32 bits of a seed; by those alone all seeds would have the same masks."""
    drawn: list[tuple[float, ...]] = []

    def recorded(start: int, device: torch.device) -> None:
        set_generators(start, device)
        drawn.append(tuple(torch.rand(4).tolist()))
        set_generators(start, device)

    monkeypatch.setattr(training_run, "set_generators", recorded)
    seeds = (1, 2, 1 + 2**31, 1 + 2**32, 2**63 - 1)
    summaries = [run(space(seed=seed, **(BRIEF | {"n_episode": 2})))[1] for seed in seeds]
    assert len(set(drawn)) == len(drawn) == 2 * len(seeds)
    assert len({summary.model_sha256 for summary in summaries}) == len(seeds)
    begun = [make_model(FewshotTrainingParams(seed=seed), (1, SIZE, SIZE), None).state_dict() for seed in seeds]
    assert len({weights_digest(each) for each in begun}) == len(seeds)


@pytest.mark.part(of=3, law="a training holds to its plan and ends with the same bits")
def test_a_checkpoint_of_another_precision_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without units for bfloat16 trains in float32, and has the same capability to torch."""
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    narrow = TrainingPrecision(compute_dtype=torch.bfloat16)
    lines: list[str] = []
    kept = MemoryArtifacts()
    for precision in (narrow, TrainingPrecision()):
        monkeypatch.setattr(fewshot_training, "training_precision", lambda params, device, found=precision: found)
        made = space(dtype="float32", use_amp=True, **BRIEF)
        made.ports.scratch, made.resume.checkpoint_seconds = kept, 1e-9
        made.ports.log = lambda level, message: lines.append(message)
        run(made)
    assert any("it was made under another precision" in line for line in lines)


@pytest.mark.part(of=3, law="a training holds to its plan and ends with the same bits")
def test_rows_are_the_parts_of_the_training() -> None:
    made = space(method="ProFOCT_cosine", batch_norm="frozen", gradient_accumulation_steps=3, **BRIEF)
    rows, summary = run(made)
    names = [row.layer for row in rows]
    assert names == [*(f"backbone.block{place}" for place in range(1, 5)), "backbone.pool", "head", "regulariser",
                     "optimiser"]  # fmt: skip
    assert sum(row.parameter_count for row in rows) == summary.parameters
    assert summary.components == len(rows)
    # a normalisation with frozen statistics keeps two numbers a channel less than on the meta device
    assert all(row.metrics.measured_bytes == pytest.approx(row.metrics.planned_bytes, rel=0.04) for row in rows)
    moments = next(row for row in rows if row.layer == "optimiser").metrics.measured_bytes
    trained = {name: tensor for name, tensor in weights(made).items() if "running" not in name and "num_b" not in name}
    assert moments == sum(2 * tensor.nbytes + 4 for tensor in trained.values())
    delivered = space(method="ProFOCT_cosine", batch_norm="frozen", gradient_accumulation_steps=3, **BRIEF)
    delivered.resume = Resume(completed=frozenset({(KIND, 0), (KIND, 6)}))
    assert [row.ordinal for row in run(delivered)[0]] == [1, 2, 3, 4, 5, 7]


def test_given_weights_are_tested_as_they_are() -> None:
    trained, truth = trained_once()
    tested = space(images(weights=weights(trained)), num_epoch=0, weights="w")
    rows, summary = run(tested)
    assert summary.accuracies[-1].accuracy == truth.accuracies[-1].accuracy
    # untrained is a network without any training, that of the weights' file included
    assert [each.untrained for each in summary.accuracies] == [each.untrained for each in truth.accuracies]
    assert (summary.episodes, summary.best_epoch, summary.losses) == (0, None, ())
    counts = {name for name in weights(trained) if name.endswith("num_batches_tracked")}
    assert (
        distance(
            *({name: made[name] for name in made if name not in counts} for made in map(weights, (trained, tested)))
        )
        == 0
    )
    assert all(row.metrics.measured_bytes is None for row in rows)
    backbone = {
        name.removeprefix("backbone."): each for name, each in weights(trained).items() if name.startswith("backbone.")
    }
    run(space(images(weights=backbone), num_epoch=0, weights="w", method="ProtoNet", test_iter=2))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"backbone": "Conv6"}, "are missing"),
        ({"width": 6}, r"`backbone.blocks.0.conv.weight` is \[4, 1, 3, 3\], where it has \[6, 1, 3, 3\]"),
        ({"method": "ProtoNet"}, "belong to no part of it"),
        ({"k_shot": 1}, r"`head.shot_weights` is \[2\], where it has \[1\]"),
    ],
)
def test_weights_of_another_model_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        run(space(images(weights=weights(trained_once()[0])), num_epoch=0, weights="w", **changed))
    assert refused.value.pointer == "/fewshot_training/weights"


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (images(classes=2), {}, "an episode of 3 classes needs as many, and the split has 2"),
        (
            images(per_class=4),
            {},
            r"class 'train 0' has 4 images, and an episode takes 5 of a class: 2 .* and 3 queries",
        ),
        (images(), {"backbone": "ResNet18", "width": 64, "n_query": 9}, "has 6 images, and an episode takes 11"),
    ],
)
def test_splits_that_are_too_small_are_refused(data: ImageData, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(space(data, **options))


def test_an_empty_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SIZE", 10)
    with pytest.raises(UsageError, match=r"the map of Conv4 is empty for images of size 10; the smallest .* is 16"):
        run(space())


def test_a_loss_that_is_not_finite_names_its_episode() -> None:
    with pytest.raises(NonFiniteLoss, match=r"episode \d+.* take a smaller learning rate"):
        run(space(learning_rate=1e300, optimiser="SGD"))


@pytest.mark.part(of=3, law="a training holds to its plan and ends with the same bits")
def test_a_training_that_runs_out_of_memory_goes_on_by_a_lower_way(monkeypatch: pytest.MonkeyPatch) -> None:
    # the third episode is the one that fails
    truth, short = (space(batch_norm="frozen", num_epoch=1, n_episode=3) for _ in range(2))
    run(truth)
    real, asked = training_run.split_gradients, []

    def failing(*args: Any, **options: Any) -> Tensor:
        asked.append((options["chunk"], options["checkpointing"]))
        loss = real(*args, **options)
        if len(asked) in (3, 4):
            raise MemoryError("can't allocate memory")
        return loss

    monkeypatch.setattr(training_run, "split_gradients", failing)
    plans: list[Any] = []
    short.ports.announce_plan = plans.append
    run(short)
    # once more after memory was freed, then by less
    assert asked[:4] == [(None, False)] * 4
    assert distance(weights(truth), weights(short)) <= 1e-10
    assert plans[-1]["training"] != plans[0]["training"]
    assert len(plans[-1]["planning_errors"]) == 2

    def never(*args: Any, **options: Any) -> Tensor:
        raise MemoryError("can't allocate memory")

    monkeypatch.setattr(training_run, "split_gradients", never)
    with pytest.raises(OutOfMemory, match="the gradient of an episode ran out of memory"):
        run(space(**BRIEF))


def test_parts_whose_measurement_runs_out_of_memory_are_counted_by_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    real, given = fewshot_training.count_components, []

    def count(run: Any, plans: Any, images: Any) -> Any:
        given.append(images is not None)
        if images is not None:
            raise MemoryError("can't allocate memory")
        return real(run, plans, images)

    (truth, _), short = trained_once(), space()
    monkeypatch.setattr(fewshot_training, "count_components", count)
    run(short)
    assert given == [True, False]
    assert distance(weights(truth), weights(short)) == 0


def test_a_plan_without_epochs_counts_no_step() -> None:
    stages = {}
    for epochs in (0, 2):
        made = space(images(weights={}), num_epoch=epochs, weights="w")
        made.resume.checkpoint_seconds = 60
        plan = estimate_training(made)
        stages[epochs] = plan["stages"]["training"]
        names = {term["name"] for term in plan["terms"] if term["stage"] == "training"}
        assert names == {"weights"} if epochs == 0 else {"weights", "gradients", "kept activations"} <= names
    assert stages[0]["host_bytes"] < stages[2]["host_bytes"]
    assert stages[0]["disk_bytes"] == 0


@pytest.mark.part(of=3, law="a training holds to its plan and ends with the same bits")
def test_the_plan_names_what_a_dense_covariance_would_add() -> None:
    made = space(method="ProFOCT_cosine", pool="flatten", width=64)
    plan = estimate_training(made)
    assert "where a dense covariance of 64 features would add" in plan["why"]
    assert plan["fits"]
    assert plan["training"] == {"chunk": 0, "checkpointing": 0, "head_slices": 1}
    assert set(plan["stages"]) == {"training", "testing"}


def test_float64_computes_without_16_bits_and_says_so() -> None:
    rows, summary = run(space(use_amp=True, **BRIEF))
    assert summary.compute_dtype == "float64"
    assert summary.amp_fallback is not None
    assert {row.record.amp for row in rows} == {"off"}
    assert {row.record.amp_fallback for row in rows} == {summary.amp_fallback}


def test_the_record_has_the_words_of_its_field_for_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch computes in bfloat16 on every CPU; whether it has units for that is not the question here
    narrow = TrainingPrecision(compute_dtype=torch.bfloat16)
    monkeypatch.setattr(fewshot_training, "training_precision", lambda params, device: narrow)
    rows, summary = run(space(dtype="float32", use_amp=True, **BRIEF))
    assert summary.compute_dtype == "bfloat16"
    assert {row.record.amp for row in rows} == {"bf16"}


def test_16_bits_of_the_other_kind_are_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without bfloat16 computes in float16, where it was asked for any 16 bits."""
    other = TrainingPrecision(compute_dtype=torch.float16, reason="this device has no bfloat16 units")
    assert other.fallback is None
    monkeypatch.setattr(fewshot_training, "training_precision", lambda params, device: other)
    made = space(dtype="float32", use_amp=True, **BRIEF)
    said: list[tuple[str, str]] = []
    made.ports.log = lambda level, message: said.append((level, message))
    rows, summary = run(made)
    assert (summary.compute_dtype, summary.amp_fallback) == ("float16", None)
    assert {row.record.amp_fallback for row in rows} == {None}
    assert not [message for level, message in said if level == "warning" and "16" in message]
    full = TrainingPrecision(reason="this device has no units for 16 bits")
    assert full.fallback == full.reason


def test_the_kind_is_that_of_the_plan() -> None:
    assert fewshot_training.KIND == KIND


@pytest.mark.part(of=16, by=("pool",))
@pytest.mark.parametrize("pool", ["flatten", "gap"])
@pytest.mark.parametrize("method", ["FSCT_cosine", "CTX_cosine"])
def test_images_need_not_be_square(method: str, pool: str) -> None:
    oblong: dict[Split, Any] = {split: Drawn(split, 5, 6) for split in SPLITS}
    for each in oblong.values():
        each.shape, each.read = (1, 32, 16), partial(oblong_images, each)
    rows, summary = run(space(ImageData(splits=oblong, sha256="0"), method=method, pool=pool, num_epoch=1))
    assert rows[-2].metrics.planned_bytes == rows[-2].metrics.measured_bytes
    assert summary.episodes == SMALL["n_episode"]


def oblong_images(images: Drawn, place: int, indices: tuple[int, ...]) -> Tensor:
    return draw(images.split, place, indices, 0, image_size=32)[..., :16]


@pytest.mark.parametrize("number", [1e30, 1e308])
def test_weights_that_overflow_in_the_last_step_are_no_accuracy(number: float) -> None:
    options = {"dtype": "float32"} if number < 1e38 else {}
    with pytest.raises(NonFiniteLoss, match="the scores of a test episode must be finite"):
        run(space(learning_rate=number, optimiser="SGD", method="ProtoNet", n_episode=1, num_epoch=1, **options))


def test_a_plan_refuses_splits_that_are_too_small() -> None:
    splits: dict[Split, Any] = {split: Drawn(split, 3 if split == "test" else 5, 6) for split in SPLITS}
    few = space(ImageData(splits=splits, sha256=""), n_way=4)
    with pytest.raises(UsageError, match=r"^test: an episode of 4 classes .* has 3; lower `n_way`, or give") as caught:
        estimate_training(few)
    assert caught.value.pointer == "/data"
    with pytest.raises(UsageError, match="class 'train 0' has 6 images, and an episode takes 1000000002 of"):
        estimate_training(space(n_query=10**9))


def test_fp16_on_a_cpu_names_its_field() -> None:
    with pytest.raises(UsageError, match="fp16 must run on a CUDA device") as caught:
        estimate_training(space(dtype="float32", use_amp=True, amp_dtype="fp16"))
    assert caught.value.pointer == "/fewshot_training/amp_dtype"


@pytest.mark.part(of=3, law="a training holds to its plan and ends with the same bits")
def test_the_plan_of_the_tests_holds_the_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences of all queries to all classes, in pixels, are more than all else of a narrow network."""
    # images that are kept are none of the memory of a test
    monkeypatch.setitem(globals(), "strokes", draw)
    many = {split: Drawn(split, 12, 6, channels=16) for split in SPLITS}
    made = space(ImageData(splits=many, sha256="0"), n_way=12, n_query=4, width=1, dtype="float32")
    plans = TrainingPlans.of(made)
    way = next(plans.ways())
    planned = sum(term.size_bytes for term in plans.plan(way).terms if term.name in {"pass", "head"})
    test = EpisodeTest(
        episodes=Episodes(
            params=made.options.of(KIND), split="test", images=many["test"], device=torch.device("cpu"),
            dtype=torch.float32,
        ),
        chunk=made.options.of(KIND).images, head_slices=1, precision=plans.precision, step=lambda: None,
    )  # fmt: skip
    events = StorageEvents()
    with events.noted():
        test.pixels()
    # beside them there are hits and labels
    assert 0.9 * planned < max(events.held) <= planned + 4096
    # undivided, 48 queries by 12 classes
    assert planned < 48 * 12 * 16 * SIZE * SIZE * 4
