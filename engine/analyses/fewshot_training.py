"""`fewshot_training`: train and test a few-shot model within a budget, by the gradient of the undivided episode.

::

    plan      every exact way to the gradient with its bytes; the fastest that fits, or a refusal
    training  one step for each episode, a test on validation classes after each epoch, the best weights kept
    testing   the kept model on test classes, beside pixels and the untrained network on the same episodes
    rows      one for each stage of the backbone, the head, the regulariser and the optimiser
"""

from collections.abc import Generator, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from catalog.analyses.analysis import LayerResult
from catalog.analyses.fewshot_training import (
    ComponentMetrics,
    EpisodeAccuracy,
    FewshotTrainingParams,
    FewshotTrainingSummary,
    Vic,
)
from catalog.responses.layer_record import LayerRecord, Observed
from engine.analyses.costs.fewshot_training import (
    KIND,
    TESTING,
    TRAINING,
    TrainingPlans,
    TrainingWay,
    images_of,
    smallest_budgets,
)
from engine.analyses.fewshot.component_bytes import Component, count_components, with_taken
from engine.analyses.fewshot.fewshot_model import (
    Episodes,
    make_model,
    training_precision,
    weights_digest,
)
from engine.analyses.fewshot.training_run import EpisodeTest, TrainingRun, compared
from engine.analyses.layer_analysis import finite_summary
from engine.analyses.spectra.search_checkpoints import SearchCheckpoints
from engine.collection.run_passes import announce
from engine.image_data import SPLITS, Split
from engine.measurement.representation_record import held_bytes
from engine.memory.budget import map_large_blocks
from engine.memory.guard import PlanningError
from engine.memory.out_of_memory import free_memory, ran_out_of_memory
from engine.memory.plan import BUDGETED, Plan
from engine.model.determinism import Numerics, set_numerics
from engine.training.training_peak import MOMENTS
from engine.workspace import Workspace

_AMP = {torch.float32: "off", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Words of the record for what the network computed in."""
_ASSUMED = ("every image is as its header says",)


def estimate_training(workspace: Workspace) -> dict[str, Any]:
    """Return the plan of a training from shapes alone, with its budget and the smallest that would do."""
    plans, budget = TrainingPlans.of(workspace), workspace.machine.budget
    plan = plans.chosen(budget)
    smallest = smallest_budgets(plans, budget)
    return plan.as_json() | {
        **workspace.machine.planned_context,
        "fits": plan.fits(budget),
        "budget": {"device_bytes": budget.device_bytes, "host_bytes": budget.host_bytes},
        "smallest_budget": {f"{place}_bytes": least and least.size_bytes for place, least in smallest.items()},
        "smallest_budget_keeps": dict.fromkeys(smallest),
        "assumed": list(_ASSUMED),
    }


class FewshotTraining:
    """One training of one job.

    Args:
        params: Its options.
        workspace: The job with its images, machine and ports.

    Memory:
        As the chosen plan counts it.
    """

    kind = KIND

    def __init__(self, params: FewshotTrainingParams, workspace: Workspace) -> None:
        self.params = params
        self.workspace = workspace
        self.numerics = Numerics.here(workspace.machine.device, workspace.resume.numerics)
        self.heard: set[str] = set()
        """Operations without a deterministic form that ran."""

    def rows(self) -> Generator[LayerResult, None, FewshotTrainingSummary]:
        """Train, test, and yield a row for each component that an earlier attempt has not delivered.

        Raises:
            BudgetExceeded: If no exact way fits the budget, before anything is drawn.
            EngineError: As ``engine.errors`` lists.
        """
        workspace, machine = self.workspace, self.workspace.machine
        with set_numerics(self.numerics, self.heard):
            plans = TrainingPlans.of(workspace)
            plan = plans.chosen(machine.budget)
            self._announce(plan, plans)
            way = TrainingWay.read(plan.chosen, plans.precision.compute_dtype)
            if way is None:
                raise ValueError("a plan of a training names its way")
            run, components = self._train(plans, way, plan)
            accuracies = self._test(run)
        yield from self._component_rows(run, components, plan)
        workspace.ports.raise_if_cancelled()
        return finite_summary(self._summary(run, len(components), accuracies, plans, plan), workspace.ports.log)

    def _announce(self, plan: Plan, plans: TrainingPlans) -> None:
        """Let everyone who looks at the plan look at it, and hold it; refuse what does not fit."""
        workspace, machine = self.workspace, self.workspace.machine
        machine.curve.stages.plan = plan
        machine.guard.announce = partial(announce, workspace, self.numerics)
        announce(workspace, self.numerics, plan, ())
        workspace.results.plan = plan
        if not plan.fits(machine.budget):
            plan.require(machine.budget, smallest_budgets(plans, machine.budget))
        workspace.ports.log("info", plan.why)
        precision = plans.precision
        if precision.fallback is not None:
            workspace.ports.log("warning", f"`fewshot_training.use_amp` is not used as asked: {precision.fallback}")
        elif precision.reason is not None:
            workspace.ports.log("info", f"the network computes in {precision.compute_dtype}: {precision.reason}")
        machine.guard.hold(plan)

    def _train(self, plans: TrainingPlans, way: TrainingWay, plan: Plan) -> tuple[TrainingRun, list[Component]]:
        workspace, machine, params = self.workspace, self.workspace.machine, self.params
        precision = training_precision(params, machine.device)
        data = images_of(workspace)
        model = make_model(params, data.shape, data.weights).to(machine.device)
        run = TrainingRun(
            params=params,
            model=model,
            way=way,
            precision=precision,
            episodes=self._episodes("train"),
            validation=self._episodes("validation"),
            checkpoints=SearchCheckpoints(
                workspace=workspace,
                conditions=dict(workspace.resume.conditions)
                | {
                    "images": data.sha256,
                    "weights": None if data.weights is None else weights_digest(data.weights),
                    "numerics": self.numerics.recorded(),
                    # processors of one capability differ in the 16 bits that they compute in
                    "precision": str(precision.compute_dtype),
                },
                work="training",
            ),
            report=lambda done, total: workspace.ports.report(TRAINING, done, total, "episodes"),
            raise_if_cancelled=workspace.ports.raise_if_cancelled,
            lower=partial(self._lower, plans),
        )
        if plans.maps_blocks:
            map_large_blocks()
        with machine.operation(TRAINING, TRAINING):
            components = self._components(run, plans)
            run.run()
        moments = sum(term.size_bytes for term in plan.terms if term.name == MOMENTS)
        components = with_taken(components, run, moments)
        run.forget_moments()
        model.load_state_dict(run.kept)
        return run, components

    def _components(self, run: TrainingRun, plans: TrainingPlans) -> list[Component]:
        """Measure the parts; where memory runs out meanwhile, by shapes alone: steps have lower ways to take."""
        try:
            return count_components(run, plans, run.episodes.read(0) if self.params.num_epoch else None)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
        # what the attempt held is unreachable only now, outside of its except block
        free_memory(self.workspace.machine.device)
        return count_components(run, plans, None)

    def _lower(self, plans: TrainingPlans, way: TrainingWay, said: str) -> TrainingWay:
        """Return the way to try after one ran out of memory: itself once more with memory freed, then a lower one.

        ``OutOfMemory`` if no exact way takes less.
        """
        guard, planned = self.workspace.machine.guard, plans.plan(way)
        tried_before = any(error.rung == way.described for error in guard.planning_errors)
        foreseen = {place: planned.stage_bytes(place, TRAINING) for place in BUDGETED}
        missed = PlanningError(
            what="the gradient of an episode",
            layer=None,
            stage=TRAINING,
            rung=way.described,
            foreseen_device_bytes=foreseen["device"],
            foreseen_host_bytes=foreseen["host"],
            free_device_bytes=guard.free_bytes("device"),
            free_host_bytes=guard.free_bytes("host"),
            said=said,
        )
        guard.missed(missed)
        if not tried_before:
            return way
        lower = plans.below(way)
        if lower is None:
            raise guard.exhausted(missed, "take a smaller backbone, smaller images or fewer of them")
        guard.replan(lower.chosen())
        return lower

    def _episodes(self, split: Split) -> Episodes:
        dtype = torch.float64 if self.params.dtype == "float64" else torch.float32
        images, device = images_of(self.workspace).splits[split], self.workspace.machine.device
        return Episodes(params=self.params, split=split, images=images, device=device, dtype=dtype)

    def _test(self, run: TrainingRun) -> tuple[EpisodeAccuracy, ...]:
        workspace, machine, params = self.workspace, self.workspace.machine, self.params
        total = 2 * 3 * params.test_iter
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            workspace.ports.raise_if_cancelled()
            workspace.ports.report(KIND, done, total, "episodes")

        with machine.operation(TESTING, TESTING):
            untrained = make_model(params, images_of(self.workspace).shape, None).to(machine.device)
            found = []
            for split in SPLITS[1:]:
                test = EpisodeTest(
                    episodes=self._episodes(split),
                    chunk=run.way.way.chunk or params.images,
                    head_slices=run.way.head_slices,
                    precision=run.precision,
                    step=step,
                )
                of = test.accuracies(run.model), test.pixels(), test.untrained(untrained)
                found.append(compared(split, *of))
        self._write(run)
        return tuple(found)

    def _write(self, run: TrainingRun) -> None:
        artifacts, state = self.workspace.ports.artifacts, run.state
        artifacts.save_tensors("model.safetensors", dict(run.kept), {"format": "pt"})
        curve = {"episodes": state.curve, "losses": state.losses, "validation": state.validation}
        artifacts.save_json("curve.json", curve)

    def _component_rows(self, run: TrainingRun, components: list[Component], plan: Plan) -> Iterator[LayerResult]:
        delivered, machine = self.workspace.resume.completed, self.workspace.machine
        for ordinal, component in enumerate(components):
            if (KIND, ordinal) in delivered:
                continue
            now = held_bytes(machine.device)
            blank: dict[str, Any] = dict.fromkeys(LayerRecord.__dataclass_fields__)
            known = {
                "branch": "trained",
                "why": run.way.described,
                "seed": self.params.seed,
                "dtype": self.params.dtype,
                "amp": _AMP[run.precision.compute_dtype],
                "amp_fallback": run.precision.fallback,
                "nondeterministic": tuple(sorted(self.heard)),
                "planned_peak_bytes": plan.largest_peak_bytes,
            }
            yield LayerResult(
                kind=KIND,
                ordinal=ordinal,
                layer=component.name,
                module=component.module,
                status="covered",
                reason=None,
                parameters=component.parameters,
                parameter_count=component.parameter_count,
                metrics=ComponentMetrics(
                    planned_bytes=component.planned_bytes,
                    measured_bytes=component.measured_bytes,
                    output_shape=component.output_shape,
                ),
                record=LayerRecord(**(blank | known)),
                observed=Observed(
                    seconds=component.seconds,
                    allocated_before_bytes=now[0],
                    allocated_after_bytes=now[0],
                    reserved_before_bytes=now[1],
                    reserved_after_bytes=now[1],
                    host_before_bytes=now[2],
                    host_after_bytes=now[2],
                    not_replayed=self.numerics.not_replayed(self.workspace.resume.numerics),
                    refused_rungs=(),
                    factors_from=None,
                    measured_peak_bytes=machine.curve.stages.peak_bytes(machine.device),
                ),
            )

    def _summary(
        self,
        run: TrainingRun,
        components: int,
        accuracies: tuple[EpisodeAccuracy, ...],
        plans: TrainingPlans,
        plan: Plan,
    ) -> FewshotTrainingSummary:
        params = self.params
        place = plans.place
        taken = next((row for row in self.workspace.machine.curve.stages.as_json() if row["stage"] == TRAINING), {})
        vic = run.state.vic
        test = accuracies[-1]
        return FewshotTrainingSummary(
            components=components,
            parameters=sum(each.numel() for each in run.model.trained),
            accuracies=accuracies,
            test_accuracy=test.accuracy,
            test_half_width=test.half_width,
            episodes=run.state.episodes,
            best_epoch=run.state.best_epoch,
            losses=tuple(run.state.losses),
            vic=None if vic is None else Vic(**{**asdict(params.vic), **asdict(vic)}),
            slices=run.way.way.slices(params.images),
            head_slices=run.way.head_slices,
            checkpointing=run.way.way.checkpointing,
            exact=plans.exactness(run.way),
            compute_dtype=str(run.precision.compute_dtype).removeprefix("torch.")
            if run.precision.compute_dtype != torch.float32
            else params.dtype,
            amp_fallback=run.precision.fallback,
            skipped_steps=run.state.skipped,
            predicted_peak_bytes=plan.stage_bytes(place, TRAINING),
            measured_peak_bytes=taken.get(f"measured_{place}_bytes"),
            dense_covariance_bytes=plans.dense_bytes if params.penalised else None,
            model_sha256=weights_digest(run.kept),
        )
