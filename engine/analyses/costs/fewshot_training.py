"""The plan of a few-shot training: the bytes of each exact way to an episode's gradient, and the fastest that fits.

    training    weights, gradients, moments, kept activations, features and cotangents, head and regulariser, at the
                moment when they are most together; a simulated step on the meta device gives all of them
    testing     the kept model and the untrained one, a pass without a graph, and the head over a slice of queries

Ways differ in the images that pass at once, in checkpointing, and in the queries that the head takes at once. Their
gradients are the same but for rounding.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.utils.flop_counter import FlopCounterMode

from catalog.analyses.fewshot_training import FewshotTrainingParams
from engine.analyses.fewshot.fewshot_model import (
    FewshotModel,
    baseline_slices,
    draw_episode,
    episode_loss,
    evaluated,
    first_weights,
    head_slices,
    optimiser_of,
    terms_of,
    training_precision,
)
from engine.fewshot.head import Head
from engine.fewshot.heads import ProtoNet
from engine.image_data import SPLITS, ImageData
from engine.memory.budget import MemoryBudget, give_back_host_memory, resident_bytes, warm_up
from engine.memory.device_speed import typical_speed
from engine.memory.plan import (
    BUDGETED,
    DEVICE_LIBRARY_BYTES,
    LIBRARY_BYTES,
    Budgeted,
    Chosen,
    Enough,
    Plan,
    Term,
    readable_bytes,
)
from engine.model.pass_peak import StorageEvents
from engine.planning.job_plan import named_budget, smallest_budget
from engine.training.mixed_precision import TrainingPrecision
from engine.training.split_gradients import slices_inputs
from engine.training.training_peak import PARTS, WEIGHTS, StepMemory, TrainingStep, predict_pass
from engine.training.ways import Way, dense_covariance_bytes, exact_ways, kept_activations, padded_bytes
from engine.workspace import Workspace

KIND = "fewshot_training"
TRAINING, TESTING = "training", "testing"
_META = torch.device("meta")
_MOST_FREED = 256 * 2**20
"""Bytes that glibc keeps of freed blocks between others in use: 140 to 225 MiB were measured beyond what libraries take
(`benchmarks/results/fewshot.json`)."""
_TRACED_SLICES = 3
"""Slices of the queries that a simulated step computes: gradients stand from the second on."""
_FINER_HEAD = 8
"""Slices of the queries that are weighed besides those asked for: more would save little of the head alone."""


@dataclass(frozen=True, kw_only=True)
class TrainingWay:
    """A way to the gradient of an episode, with the slices of its queries in the head."""

    way: Way
    head_slices: int

    def chosen(self) -> Chosen:
        """The way as a plan stores it."""
        return Chosen(
            training={
                "chunk": self.way.chunk or 0,
                "checkpointing": int(self.way.checkpointing),
                "head_slices": self.head_slices,
            }
        )

    @classmethod
    def read(cls, chosen: Chosen, compute_dtype: torch.dtype) -> "TrainingWay | None":
        """Return the way that a plan chose; None where it chose none."""
        stored = chosen.training
        if not stored:
            return None
        way = Way(
            chunk=stored["chunk"] or None, checkpointing=bool(stored["checkpointing"]), compute_dtype=compute_dtype
        )
        return cls(way=way, head_slices=stored["head_slices"])

    @property
    def described(self) -> str:
        """The way in words."""
        queries = "" if self.head_slices == 1 else f", queries in {self.head_slices} slices"
        return f"{self.way.described}{queries}"


@dataclass(kw_only=True)
class TrainingPlans:
    """All exact ways of one training, as plans."""

    workspace: Workspace
    params: FewshotTrainingParams
    held_bytes: int = 0
    _plans: dict[TrainingWay, Plan] = field(default_factory=dict)
    _memories: dict[int, StepMemory] = field(default_factory=dict)
    _counts: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, workspace: Workspace) -> "TrainingPlans":
        """Plan the training of a job.

        ``FewShotRefused`` if a split has too few classes or images, or the backbone's map is empty for the images.
        """
        params = workspace.options.of(KIND)
        if workspace.inputs.images is not None:
            for split in SPLITS:
                draw_episode(0, params, split, workspace.inputs.images.splits[split])
        # a job has begun its libraries' threads by the time it plans
        warm_up()
        plans = cls(workspace=workspace, params=params)
        # what torch loads for tensors without numbers stays with the process
        plans._memory(head_slices(plans.params)).peak(next(plans.ways()).way)
        give_back_host_memory()
        plans.held_bytes = resident_bytes()
        return plans

    @cached_property
    def model(self) -> FewshotModel:
        """The model on the meta device."""
        with _META:
            return FewshotModel(self.params, self.shape).to(self.dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an image."""
        return images_of(self.workspace).shape

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and steps."""
        return torch.float64 if self.params.dtype == "float64" else torch.float32

    @cached_property
    def precision(self) -> TrainingPrecision:
        """Precision of the passes on the device that is planned for."""
        return training_precision(self.params, self.workspace.machine.device)

    @property
    def place(self) -> Budgeted:
        """The place of what the device holds."""
        return "device" if self.workspace.machine.device.type == "cuda" else "host"

    @property
    def maps_blocks(self) -> bool:
        """Whether freed blocks return to the system at once, which takes time: where a budget of the host is named."""
        return self.place == "host" and self.workspace.machine.guard.by_kernel

    @property
    def sliced(self) -> bool:
        """Whether images may pass through the backbone a few at a time."""
        return slices_inputs(self.model.backbone, self.params.batch_norm)

    def ways(self) -> Iterator[TrainingWay]:
        """Yield all exact ways, fastest first; of equally fast ones the head in fewer slices."""
        queries = self.params.n_way * self.params.n_query
        least = head_slices(self.params)
        finer = min(_FINER_HEAD, queries)
        several = [least] if self.params.use_vic_on_attention or finer <= least else [least, finer]
        found = exact_ways(
            self.params.images,
            coupled=not self.sliced,
            has_chain=True,
            least_slices=self.params.gradient_accumulation_steps,
            compute_dtype=self.precision.compute_dtype,
        )
        every = (TrainingWay(way=way, head_slices=count) for way in found for count in several)
        yield from sorted(every, key=lambda each: (each.way.relative_cost(self.params.images), each.head_slices))

    def chosen(self, budget: MemoryBudget) -> Plan:
        """Return the fastest plan that fits, or the one that takes least."""
        earlier = self.workspace.resume.chosen
        replayed = None if earlier is None else TrainingWay.read(earlier, self.precision.compute_dtype)
        if replayed is not None:
            return replace(self.plan(replayed), why="an earlier attempt of this job chose so")
        faster: Plan | None = None
        plans = []
        for way in self.ways():
            plan = self.plan(way)
            if plan.fits(budget):
                return replace(plan, why=self._why(way, plan, faster, budget))
            faster = faster or replace(plan, why=way.described)
            plans.append(plan)
        least = min(plans, key=lambda each: each.peak_bytes(self.place))
        return replace(least, why="nothing fits, whatever is sliced")

    def below(self, way: TrainingWay) -> TrainingWay | None:
        """Return the fastest exact way with a lower peak than one that ran out of memory; None where there is none."""
        held = self.plan(way).stage_bytes(self.place, TRAINING)
        ways = list(self.ways())
        later = ways[ways.index(way) + 1 :] if way in ways else ways
        return next((each for each in later if self.plan(each).stage_bytes(self.place, TRAINING) < held), None)

    def _why(self, way: TrainingWay, plan: Plan, faster: Plan | None, budget: MemoryBudget) -> str:
        why = f"{way.described}: the fastest exact way that fits; {self.exactness(way)}"
        if faster is not None:
            needed = readable_bytes(faster.peak_bytes(self.place))
            why = (
                f"{way.described}: the fastest exact way that fits ({faster.why} needs {needed}); {self.exactness(way)}"
            )
        if self.params.penalised:
            dense = self.dense_bytes
            allowed = budget.device_bytes if self.place == "device" else budget.host_bytes
            fits = "" if plan.peak_bytes(self.place) + dense <= allowed else ", with which it would not fit"
            features = math.prod(self.model.feature_shape)
            why += (
                f"; the penalty takes {self.params.n_way * self.params.k_shot}² numbers, where a dense covariance of "
                f"{features} features would add {readable_bytes(dense)}{fits}"
            )
        return why

    @property
    def dense_bytes(self) -> int:
        """Bytes that a dense covariance of the support's features would add."""
        rows = self.params.n_way * self.params.k_shot
        return dense_covariance_bytes(rows, math.prod(self.model.feature_shape), self.dtype.itemsize)

    def exactness(self, way: TrainingWay) -> str:
        """Say why the gradient is that of the undivided episode."""
        if way.way.chunk is not None:
            frozen = "BatchNorm runs by its running statistics, so that " if self.params.batch_norm == "frozen" else ""
            return (
                f"{frozen}features of an image depend on it alone, and each slice is differentiated by the cotangents "
                "of the whole episode"
            )
        if way.way.checkpointing:
            return "all images pass together, and blocks are computed again in the backward pass"
        return "all images pass together"

    def plan(self, way: TrainingWay) -> Plan:
        """Return the plan of one way."""
        if way not in self._plans:
            self._plans[way] = Plan(
                terms=tuple(self._terms(way)), chosen=way.chosen(), why=way.described, seconds=self._seconds(way)
            )
        return self._plans[way]

    def _terms(self, way: TrainingWay) -> Iterator[Term]:
        yield Term("process", "resident now", self.held_bytes, "host", source="measured")
        yield Term("libraries", "a constant, measured", LIBRARY_BYTES, "host", "throughout", source="estimated")
        if self.place == "device":
            formula = "2 workspaces of cuBLAS · 32 MiB, and 17 MiB, measured"
            yield Term("libraries", formula, DEVICE_LIBRARY_BYTES, "device", "throughout", source="estimated")
        held = sum(split.held_bytes for split in images_of(self.workspace).splits.values())
        yield Term("drawn images", "as many as are held of each split", held, "host", "throughout")
        if self.place == "host" and not self.maps_blocks:
            kept = kept_activations(self.model.backbone, self.shape, self.dtype).of(self.params.images)
            formula = "activations of an episode, at most 256 MiB, measured"
            yield Term("freed blocks", formula, min(_MOST_FREED, kept), "host", "throughout", source="estimated")
        weights = sum(each.nbytes for each in self.model.state_dict().values())
        # beside a device: those before them while they are replaced, or a checkpoint's model and moments as it is read
        copies = 1 if self.place == "host" else 4 if self.workspace.saves_checkpoints else 2
        formula = "those of the best epoch" + ("" if copies == 1 else f", and {copies - 1} copies on their way")
        yield Term("kept weights", formula, copies * weights, "host", "throughout")
        for name, size in self._memory(way.head_slices).peak(way.way).parts.items():
            # without an epoch no step is made, and the model alone is there
            if self.params.num_epoch or name == WEIGHTS:
                yield Term(name, PARTS[name], size, self.place, TRAINING, source="traced")
        yield Term("weights", "Σ bytes, of the kept model and the untrained one", 2 * weights, self.place, TESTING)
        passed = self._pass_bytes(way)
        scored = self._once(("head", way.head_slices), lambda: self._head_bytes(way))
        yield Term("pass", "images, and a pass without a graph", passed, self.place, TESTING, source="traced")
        yield Term("head", "beyond the pass", max(0, scored - passed), self.place, TESTING, source="traced")
        if self.place == "host" and self.dtype == torch.float32:
            padded = padded_bytes(self.model.backbone, self.shape, way.way.chunk or self.params.images)
            yield Term(
                "padded channels", "N or chunk · 16⌈C/16⌉ · HW", padded, "host", "throughout", source="estimated"
            )
        if self.workspace.saves_checkpoints and self.params.num_epoch:
            state = 3 * weights + weights
            formula = "2 · (weights and moments), and the kept weights"
            yield Term("checkpoints", formula, 2 * state, "disk", TRAINING, source="estimated")
        yield Term("model.safetensors", "the kept weights", weights, "disk", TESTING)

    def _memory(self, slices: int) -> StepMemory:
        """The memory of a step whose head takes queries in so many slices."""
        if slices not in self._memories:
            params = self.params
            loss, dtype = (
                episode_loss(params, self.model, first_weights(params), slices, first=_TRACED_SLICES),
                self.dtype,
            )
            step = TrainingStep(
                model=self.model.backbone,
                loss=lambda features: terms_of(loss, features, dtype),
                images=params.images,
                image_shape=self.shape,
                optimiser=lambda parameters: optimiser_of(params, parameters),
                head=self.model.head,
                batch_norm=params.batch_norm,
                dtype=self.dtype,
                device=self.workspace.machine.device,
            )
            self._memories[slices] = StepMemory(step)
        return self._memories[slices]

    def _once(self, key: tuple[str, int], count: Callable[[], int]) -> int:
        """Count what several ways share when it is first asked for."""
        if key not in self._counts:
            self._counts[key] = count()
        return self._counts[key]

    def _episode_bytes(self, shape: tuple[int, ...]) -> int:
        return self.params.images * math.prod(shape) * self.dtype.itemsize

    def _pass_bytes(self, way: TrainingWay) -> int:
        """Return the most bytes of an episode's images in a pass without a graph: of as many images as with one."""
        images, step = self.params.images, self._memory(way.head_slices).step
        chunk = way.way.chunk or images
        with evaluated(self.model):
            passed = self._once(("pass", chunk), lambda: predict_pass(step, chunk, way.way.compute_dtype))
        others = (images - chunk) * self._episode_bytes(self.shape) // images
        earlier = self._episode_bytes(self.model.feature_shape) if chunk < images else 0
        return passed + others + earlier

    def _head_bytes(self, way: TrainingWay) -> int:
        """Return the most bytes of images and a head: the model's, or the nearest mean of features or of pixels."""
        shape, nearest, slices = self.model.feature_shape, ProtoNet(), baseline_slices(self.params)
        heads = (self.model.head, shape, way.head_slices), (nearest, shape, slices), (nearest, self.shape, slices)
        return self._episode_bytes(self.shape) + max(self._scored_bytes(*each) for each in heads)

    def _scored_bytes(self, head: Head, shape: tuple[int, ...], slices: int) -> int:
        """Return the most bytes of an episode's features, once more while chunks of them are joined, or with scores."""
        params, events = self.params, StorageEvents()
        with _META, torch.no_grad():
            support = torch.empty(params.n_way, params.k_shot, *shape, dtype=self.dtype)
            with events.noted():
                scores = head(support, support.new_empty(-(-params.n_way * params.n_query // slices), *shape))
                del scores
        features = self._episode_bytes(shape)
        return features + max(features, *events.held)

    @cached_property
    def _operations(self) -> float:
        """Floating-point operations of one image's pass forwards."""
        with _META, torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.model.backbone.eval()(torch.empty(1, *self.shape, dtype=self.dtype))
        self.model.backbone.train()
        return float(counter.get_total_flops())

    def _seconds(self, way: TrainingWay) -> Mapping[str, float]:
        machine, params = self.workspace.machine, self.params
        speed = machine.speed or typical_speed(machine.device)
        forward = params.images * self._operations / speed.operations_per_second
        step = 3 * forward * way.way.relative_cost(params.images)
        begun = speed.seconds_an_operation * sum(1 for _ in self.model.modules()) * way.way.slices(params.images)
        epoch = params.n_episode * (step + 3 * begun) + params.test_iter * (forward + begun)
        # the kept model on test classes, the untrained one on both splits
        return {TRAINING: params.num_epoch * epoch, TESTING: 3 * params.test_iter * (forward + begun)}


def images_of(workspace: Workspace) -> ImageData:
    """Return the images that a training needs."""
    if workspace.inputs.images is None:
        raise ValueError("a training needs images")
    return workspace.inputs.images


def smallest_budgets(plans: TrainingPlans, budget: MemoryBudget) -> dict[Budgeted, Enough | None]:
    """Return the smallest budget of each place that some exact way fits."""
    plan = plans.chosen(budget)
    found = {place: smallest_budget(plans.chosen, budget, place) for place in BUDGETED}
    return {place: each and named_budget(each, plan, place) for place, each in found.items()}
