"""`influence`: scores ``−g_qᵀ (C + λ)⁻¹ g_n`` of each query q and training example n, block by block of queries.

A block's gradients are taken one example at a time, solved with the damped curvature, and multiplied by the gradients
of all training examples in one pass over the data. The pass is proven on the first queries of each block: it must give
the inner products that plain autograd gives.

References:
    Koh & Liang (2017), Understanding black-box predictions via influence functions
    Grosse et al. (2023), Studying large language model generalization with influence functions
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from catalog.analyses.influence import InfluenceMetrics, InfluenceParams, InfluenceSummary, QueryInfluence
from catalog.record import plain
from catalog.record_reader import read
from catalog.requests.inputs import Task
from engine.analyses.costs.influence import influence_cost
from engine.analyses.layer_analysis import LayerAnalysis
from engine.analyses.metrics.scored_queries import (
    ALL,
    ScoredQueries,
    layer_groups,
    list_queries,
    read_parts,
    recall,
    remember,
    require_whole_layers,
    scores_file,
    seal,
)
from engine.collect import prepare_collection
from engine.collection.checkpoints import fingerprint
from engine.collection.pass_job import PassJob
from engine.collection.probe import ProbedModel
from engine.collection.ranks.joined_job import require_one_rank
from engine.errors import DataDiffer, EmptyData, ModelRefused, NotMergeable, UsageError, WrongShape
from engine.factors.factor_set import LayerFacts
from engine.factors.kronecker_factors import digest
from engine.measurement.layer_measurement import Measured
from engine.memory.budget import MemoryBudget
from engine.memory.guard import Guard
from engine.memory.memory_curve import MemoryCurve
from engine.model.activation_memory import set_activation_checkpointing
from engine.model.batches import Batch, make_batches
from engine.model.example_digests import EnteredExamples, digest_examples
from engine.model.loss_directions import at_own_labels
from engine.operators.conjugate_gradients import Solved, solve_gauss_newton
from engine.operators.example_scores import example_gradients, of_examples, score_examples, statistics_of
from engine.operators.kronecker.layer_store import OperatorOptions
from engine.operators.kronecker_operator import KroneckerOperator
from engine.operators.parameter_space import ParameterSpace
from engine.operators.products import ExactCurvature
from engine.workspace import JobResults, ModelInputs, Workspace

KIND = "influence"
_PROVEN = 16
"""Queries of a block whose own scores go both ways."""
FORMAT = "kronoscope-influence/1"
_PROOF = {torch.float32: 1e-3, torch.float64: 1e-9}
"""Difference of a score by both routes that rounding may bring, of the product of the two vectors' lengths."""


@dataclass(kw_only=True)
class _Block:
    """A block of queries: gradients, and the same solved with the damped curvature."""

    rows: Tensor
    """(B, P), on the host."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """The solved gradients of each covered layer, shape (B, out_dim, in_dim), by its name."""
    gram: Tensor
    """⟨v_i, g_j⟩ over the covered layers, shape (B, B), float64."""
    lengths: Tensor
    """Squared lengths of v and g over the same, shape (2, B), float64."""
    solved: Solved | None = None
    squares: list[float] = field(default_factory=list)
    inner: list[float] = field(default_factory=list)


class Influence(LayerAnalysis[InfluenceParams]):
    """The scores of every query and training example.

    Memory:
        Three vectors of all parameters for each query of a block, thirteen for `ggn`; one layer's eigenvectors; the
        block's scores; the graph of a slice.
    """

    kind = KIND
    cost = staticmethod(influence_cost)

    @override
    def require(self) -> None:
        inputs = self.workspace.inputs
        if inputs.stored_scores:
            return
        if inputs.model is None or inputs.batches is None or inputs.task is None:
            raise UsageError(
                "stored factors hold no model to take gradients of; give `model`, `data` and `task` in place of "
                "`factors`: the cache gives the factors of the same collection",
                pointer="/influence",
            )
        if inputs.query is None:
            raise UsageError(
                "there are no queries; give `influence.query`, or `query=` in a notebook", pointer="/influence/query"
            )
        require_one_rank(self.workspace, KIND)
        layer_groups(self.params.groups, [name for name, _ in inputs.model.named_parameters()], parts=False)
        for data, pointer in ((inputs, "/data"), (inputs.query, "/influence/query")):
            _require_targets(data, inputs.task, pointer)
            if self.params.texts and data.text_of is None:
                raise UsageError(
                    "`influence.texts` quotes texts, and these data hold none; leave it out", pointer=pointer
                )

    @override
    def prepare(self) -> None:
        self._space = ParameterSpace.of(self.whole)
        self._groups = layer_groups(self.params.groups, [facts.name for facts in self.whole.layers], parts=True)
        self._order: Tensor | None = None
        self._artifacts: list[str] = []
        self._blocks: list[ScoredQueries] = []
        query = self.workspace.inputs.query
        self._part = None if query is None else query.part
        self._queries, self._examples, self._passed = 0 if self._part is None else self._part.begin, 0, 0
        self._entered = EnteredExamples()
        machine = self.workspace.machine
        free = machine.guard.free_bytes("host") // 4
        self._operator = KroneckerOperator(
            self.whole,
            OperatorOptions(
                of="ekfac" if self.params.of == "ekfac" else "kfac",
                kind="exact",
                stabilisation=self.workspace.options.stabilisation,
                device=machine.device,
                guard=machine.guard,
                resident_bytes=free,
            ),
        )
        for block, scores in read_parts(self.workspace.inputs.stored_scores):
            self._take(block, scores)
        if not self._blocks:
            self._score()

    def _score(self) -> None:
        """Score the queries, or those of a part."""
        machine, own, counted = self.workspace.machine, self.workspace.results.plan, self.whole.counted
        written = frozenset(() if counted is None else counted.overwritten)
        with machine.operation("influence", KIND), prepare_collection(self._apart()) as (planned, _):
            probed = planned.probed.for_passes(planned.plan.chosen, None)
            require_whole_layers(self._groups, probed.survey.treated)
            job = probed.job.laid_out(overwritten=probed.job.layout.overwritten | written)
            job = dataclasses.replace(job, entered=self._all_entered)
            self._model = fingerprint(job.model)
            if self.workspace.inputs.stored_pieces and counted is not None and counted.model != self._model:
                raise NotMergeable(
                    f"the model's numbers have the digest {self._model}, and {counted.model} in the pieces that have "
                    "collected; a factory must make the same model each time",
                    pointer="/model",
                )
            wanted = own is not None and own.chosen.activation_checkpointing
            with set_activation_checkpointing(job.model, wanted=wanted):
                for batch in self._query_batches():
                    self._block(job.moved(batch), job, probed)

    def _apart(self) -> Workspace:
        """The same job as a collection of the data's own gradients, which announces no plan of its own."""
        workspace, machine = self.workspace, self.workspace.machine
        options, budget = workspace.options, MemoryBudget.unlimited()
        collection = dataclasses.replace(
            at_own_labels(options.collection), ekfac=False, nested=False, ema_decay=None, update_freq=1,
            exact_trace=False,
        )  # fmt: skip
        # nothing is summed: what the passes hold is in the plan of this analysis
        memory = dataclasses.replace(options.memory, micro_batch=self.whole.micro_batch or options.memory.micro_batch)
        guard = Guard(budget=budget, device=machine.device, log=workspace.ports.log)
        return dataclasses.replace(
            workspace,
            options=dataclasses.replace(options, collection=collection, memory=memory, kinds=(), params={}),
            ports=dataclasses.replace(workspace.ports, announce_plan=lambda _: None, scratch=None),
            machine=dataclasses.replace(machine, curve=MemoryCurve(), budget=budget, guard=guard),
            results=JobResults(),
        )

    @property
    def _all_entered(self) -> EnteredExamples | None:
        """The examples of the collection, where it let all of the data enter."""
        collection = self.whole.collection
        ordered = collection.ema_decay is not None or collection.nested
        return None if ordered or collection.update_freq > 1 else self.whole.entered

    def _query_batches(self) -> Iterator[Batch]:
        query = self.workspace.inputs.query
        if query is None or query.batches is None:
            raise ValueError("`require` asks for queries")
        return make_batches(query.batches(), self.params.block)

    def _block(self, batch: Batch, job: PassJob, probed: ProbedModel) -> None:
        """Score one block of queries, or take it over from an earlier attempt."""
        number = self._queries // self.params.block
        stands = partial(self._conditions, digest_examples(batch, job.task), job)
        found = recall(self.workspace, number, stands)
        if found is None:
            found = self._scored(batch, job, probed)
            remember(self.workspace, number, stands(), *found)
        else:
            self.workspace.ports.log("info", f"queries from {self._queries} on were scored by an earlier attempt")
        self._take(*found)

    def _take(self, block: ScoredQueries, scores: dict[str, Tensor]) -> None:
        """Write the scores of the next block, and of a part its numbers; note what rows and summary are made of."""
        number, artifacts = self._queries // self.params.block, self.workspace.ports.artifacts
        metadata = {"format": FORMAT, "of": self.params.of, "first_query": str(self._queries)}
        artifacts.save_tensors(scores_file(number), scores, metadata)
        if self._part is not None:
            seal(artifacts, number, block, scores, {})
        self._artifacts.append(scores_file(number))
        self._blocks.append(block)
        self._entered = self._entered.joined(EnteredExamples(**block.entered))
        self._queries, self._passed = self._queries + scores[ALL].shape[0], 0
        self._examples = scores[ALL].shape[1]

    def _conditions(self, queries: Tensor, job: PassJob) -> dict[str, str]:
        """All that a block's scores depend on beside the document: model, queries and data, each in its order."""
        if self._order is None:
            found = [digest_examples(job.moved(batch), job.task).to("cpu") for batch in job.stream()]
            self._order = torch.cat(found)
        return {"model": self._model, "queries": digest(queries.to("cpu")), "data": digest(self._order)}

    def _scored(self, batch: Batch, job: PassJob, probed: ProbedModel) -> tuple[ScoredQueries, dict[str, Tensor]]:
        names = tuple(each.name for each in self._space.parameters)
        block = self._solved(example_gradients(job, batch, names))
        statistics = statistics_of(probed.survey.treated, block.vectors)
        proven = of_examples(job, next(batch.slices(_PROVEN)))
        proof, _, _ = score_examples(proven, statistics, {ALL: self._groups[ALL]}, self._report)
        difference = _prove(block, proof[ALL], job.dtype)
        scores, terms, order = score_examples(job, statistics, self._groups, partial(self._report, 1))
        if self._order is not None and not torch.equal(self._order, order):
            raise DataDiffer(
                "the data came in another order, or were others, than in the pass before, so that a place would mean "
                "two examples; give them in one order at every pass",
                pointer="/data",
            )
        self._order = order
        scored = ScoredQueries(
            self_influences=block.gram.diagonal().tolist(),
            residuals=None if block.solved is None else list(block.solved.residuals),
            iterations=None if block.solved is None else list(block.solved.iterations),
            difference=difference,
            terms=terms,
            squares=block.squares,
            inner=block.inner,
            entered=dataclasses.asdict(EnteredExamples().added(batch, job.task, None)),
            queries=None if self._part is None else self._part.examples,
        )
        scores = {name: own.neg_() for name, own in scores.items()}
        listed = list_queries(self.params, self.workspace.inputs, self._queries, scored, scores[ALL])
        scored.listed = [plain(each) for each in listed]
        return scored, scores

    def _solved(self, rows: Tensor) -> _Block:
        """Solve a block's gradients with the damped curvature."""
        count = rows.shape[0]
        block = _Block(
            rows=rows,
            gram=torch.zeros(count, count, dtype=torch.float64),
            lengths=torch.zeros(2, count, dtype=torch.float64),
        )
        solutions = None
        if self.params.of == "ggn":
            block.solved = self._searched(rows)
            solutions = block.solved.solutions.mT.contiguous()
        for facts in self.whole.layers:
            self.workspace.ports.raise_if_cancelled()
            own, operator = self._gathered(facts, rows), self._operator.layer(facts.name)
            solved = operator.apply(own, -1.0) if solutions is None else self._gathered(facts, solutions)
            solved, own = (each.transpose(0, 1).contiguous() for each in (solved, own))
            products = (solved.flatten(1) @ own.flatten(1).mT).to("cpu", torch.float64)
            lengths = torch.stack([each.flatten(1).norm(dim=1) for each in (solved, own)]).to("cpu", torch.float64)
            block.gram += products
            block.lengths += lengths.square()
            block.squares.append(float(lengths[1].square().sum()))
            block.inner.append(float(products.diagonal().sum()))
            block.vectors[facts.name] = solved
        return block

    def _gathered(self, facts: LayerFacts, rows: Tensor) -> Tensor:
        """A layer's matrices (out_dim, B, in_dim) of flat vectors (B, P), on the device."""
        device = self.workspace.machine.device
        return torch.cat([self._space.gather(facts, row[:, None].contiguous(), device=device) for row in rows], 1)

    def _searched(self, rows: Tensor) -> Solved:
        """Solve with the exact Gauss-Newton matrix of the covered parameters, preconditioned with their factors."""
        workspace, whole = self.workspace, self.whole
        job = dataclasses.replace(
            PassJob.of(workspace, workspace.machine.device),
            collection=whole.collection,
            dtype=rows.dtype,
            micro_batch=whole.micro_batch,
            entered=whole.entered,
        )
        exact = ExactCurvature(
            job=job.settled(), of="ggn", updates=whole.updates, report=self._report, parameters=self._space.parameters,
            what="the solution", remedy="take `influence.of: kfac`", pointer="/influence/of",
        )  # fmt: skip
        operator, most = self._operator, self.params.iterations
        return solve_gauss_newton(exact, operator, whole, rows, tolerance=self.params.tolerance, most=most)

    def _report(self, batches: int = 0) -> None:
        """Report the scored queries; of the block under way, the share that its pass over the data has come through."""
        data, query = self.workspace.inputs, self.workspace.inputs.query
        self._passed += batches * self.workspace.options.collection.batch_size
        done = self._queries - (0 if self._part is None else self._part.begin)
        total = done if query is None else query.examples
        block = self.params.block if total is None else min(self.params.block, total - done)
        share = min(1.0, self._passed / data.examples) if data.examples else 0.0
        self.workspace.ports.report(KIND, done + int(share * block), total, "queries")

    @override
    def layer(self, layer: Measured) -> InfluenceMetrics:
        place = self.whole.layers.index(layer.facts)
        inner = math.fsum(block.inner[place] for block in self._blocks)
        total = math.fsum(each for block in self._blocks for each in block.inner)
        return InfluenceMetrics(
            gradient_norm=math.sqrt(math.fsum(block.squares[place] for block in self._blocks) / self._queries),
            damping=self._operator.layer(layer.facts.name).damping.joint,
            self_influence=inner / self._queries,
            share=inner / total if total > 0 else None,
        )

    @override
    def report(self, done: int) -> None:
        self._report()

    @override
    def summary(self) -> InfluenceSummary:
        residuals = [each for block in self._blocks for each in block.residuals or ()]
        unconverged = [each for each in residuals if not each <= self.params.tolerance]
        if unconverged:
            self.workspace.ports.log(
                "warning",
                f"{len(unconverged)} of {self._queries} queries did not converge in {self.params.iterations} "
                f"iterations (worst residual {max(unconverged):.2g}): their scores are as good as that; raise "
                "`influence.iterations` or `stabilisation.damping`",
            )
        return InfluenceSummary(
            coverage=self.coverage,
            layers=len(self.whole.layers),
            of=self.params.of,
            queries=self._queries,
            examples=self._examples,
            loss_terms=self._blocks[-1].terms,
            query_digest=self._entered.content,
            hooked_difference=max(block.difference for block in self._blocks),
            unconverged=len(unconverged),
            worst_residual=max(residuals, default=None),
            artifacts=tuple(self._artifacts),
            listed=tuple(read(QueryInfluence, each, "listed") for block in self._blocks for each in block.listed),
        )


def _require_targets(data: ModelInputs, task: Task, pointer: str) -> None:
    """Refuse data without a first example, or one that has no target."""
    first = next(data.batches(), None) if data.batches is not None else None
    if first is None:
        raise EmptyData("there are no examples", pointer=pointer)
    if first[1] is None and task.likelihood != "model":
        raise WrongShape(
            "influence is of losses at the examples' own targets, and these have none; give them", pointer=pointer
        )


def _prove(block: _Block, found: Tensor, dtype: torch.dtype) -> float:
    """Require that the pass over the data gives the products that plain autograd gives; return the difference."""
    lengths = block.lengths.sqrt()
    scale = lengths[0][:, None] * lengths[1][None, :]
    of_some, scale = block.gram[:, : found.shape[1]], scale[:, : found.shape[1]]
    worst = float(((found.double() - of_some).abs() / torch.where(scale > 0, scale, torch.ones_like(scale))).max())
    if not worst <= _PROOF[dtype]:
        raise ModelRefused(
            f"the gradients of the queries by the layers' rows differ from plain autograd's by {worst:.2g} of their "
            "lengths, so scores would be wrong; look for examples that meet within the model in a batch, or take "
            "`collection.dtype: float64`",
            pointer="/model",
        )
    return worst
