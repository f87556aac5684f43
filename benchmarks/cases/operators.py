"""The models of the operators' benchmark, each with one batch, and what both libraries make of them.

Everything here needs torch, transformers and the engine alone: it also runs in the peers' environment, where both
libraries stand in one process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from benchmarks.cases import collection
from benchmarks.conformance.problem import Problem
from catalog.requests.collection import Collection, Stabilisation
from catalog.requests.inputs import Task
from catalog.requests.woodbury import Woodbury
from engine.collect import collect_or_read
from engine.collection.pass_job import PassJob
from engine.factors.factor_set import FactorSet
from engine.model.determinism import Numerics
from engine.operators.kronecker.layer_operator import DampingKind
from engine.operators.kronecker.layer_store import OperatorOptions
from engine.operators.kronecker_operator import KroneckerOperator
from engine.operators.products import ExactCurvature
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace

CASES = ("gpt2", "minilm")
VOCABULARY, LENGTH, SEQUENCES = 8192, 256, 8
DAMPING = 1e-3
"""Relative to the mean eigenvalue."""


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    problem: Problem
    batch: tuple[Any, Tensor]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that both libraries know, in the canonical order."""
        self.train()
        return [parameter for parameter in self.problem.model.parameters() if parameter.requires_grad]

    def train(self) -> None:
        """Let those parameters require gradients, as the peer asks for and our passes end."""
        for name in self.problem.layers:
            self.problem.model.get_submodule(name).requires_grad_(requires_grad=True)

    @property
    def size(self) -> int:
        """P."""
        return sum(parameter.numel() for parameter in self.parameters)


def built(name: str, attention: Literal["sdpa", "eager"] = "sdpa") -> Case:
    """Return the case of that name, the same weights and batch in every process.

    Args:
        name: One of ``CASES``.
        attention: The peer's GGN refuses `sdpa`, which has no forward derivative on a CPU.

    Returns:
        The case.
    """
    torch.manual_seed(0)
    if name == "minilm":
        problem, batch = collection.encoder()
        _take_attention(problem.model, attention)
        return Case(problem, batch)
    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=8, n_positions=LENGTH, vocab_size=VOCABULARY, tie_word_embeddings=False,
        use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    for module in list(model.modules()):
        for place, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                # the peer finds no other layers
                setattr(module, place, collection._linear(child))  # noqa: SLF001 - the same for all benchmarks
    _take_attention(model, attention)
    ids = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH))
    problem = Problem(
        name=name, model=model, layers=collection._measured(model, ()), task="causal_lm", examples=SEQUENCES,  # noqa: SLF001 - as above
        terms=LENGTH - 1, fisher="empirical",
    )  # fmt: skip
    return Case(problem, ({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids))


def workspace(case: Case) -> Workspace:
    """Return the job that collects the case's factors."""
    problem = case.problem
    return Workspace(
        inputs=ModelInputs(
            model=problem.model, batches=lambda: iter([case.batch]), task=Task(type=problem.task),
            examples=problem.examples,
        ),
        options=JobOptions(
            collection=Collection(
                fisher=problem.fisher, dtype="float32", batch_size=problem.examples, exact_trace=False
            ),
            woodbury=Woodbury(),
        ),
        ports=Ports(artifacts=None),
    )  # fmt: skip


def factors_of(case: Case) -> FactorSet:
    """Collect the case's factors."""
    found = collect_or_read(workspace(case))
    case.train()
    return found


def kronecker(factors: FactorSet, kind: DampingKind) -> KroneckerOperator:
    """Return our operator."""
    return KroneckerOperator(factors, OperatorOptions(kind=kind, stabilisation=Stabilisation(damping=DAMPING)))


def gauss_newton(case: Case, factors: FactorSet) -> ExactCurvature:
    """Return our exact GGN."""
    space = workspace(case)
    assert factors.parameters is not None
    return ExactCurvature(
        job=PassJob(
            workspace=space, model=case.problem.model, task=space.inputs.task, collection=space.options.collection,
            dtype=torch.float32, numerics=Numerics.here(torch.device("cpu"), None), heard=set(), micro_batch=None,
        ),
        of="ggn", updates=1, report=lambda: None, parameters=factors.parameters,
    )  # fmt: skip


class Outputs(nn.Module):
    """The model with its outputs arranged as (terms, numbers)."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.model = problem.model
        self._outputs = problem.outputs

    def forward(self, inputs: Any) -> Tensor:  # noqa: ANN401
        """Return outputs in the problem's arrangement."""
        return self._outputs(self.model, inputs)


@dataclass
class Labelled:
    """The batch with labels as (terms,)."""

    case: Case

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Begin anew."""
        inputs, targets = self.case.batch
        yield inputs, self.case.problem.labels(targets)


def arguments(case: Case) -> dict[str, Any]:
    """Return what all of the peer's operators take."""
    problem = case.problem
    loss = nn.MSELoss() if problem.loss == "mse" else nn.CrossEntropyLoss(ignore_index=problem.ignore_index)
    return {
        "model_func": Outputs(problem), "loss_func": loss, "params": case.parameters, "data": Labelled(case),
        "check_deterministic": False, "num_data": problem.examples,
        "batch_size_fn": lambda inputs: len(inputs["input_ids"]),
    }  # fmt: skip


def peer_kronecker(case: Case, factors: FactorSet) -> Any:  # noqa: ANN401 - of a library that has no types
    """Return the peer's K-FAC over our very factors, weight and bias together as everywhere here."""
    from curvlinops import KFACLinearOperator  # noqa: PLC0415 - the peers' environment alone has it

    found = KFACLinearOperator(
        **arguments(case), fisher_type="empirical", num_per_example_loss_terms=case.problem.terms,
        separate_weight_and_bias=False,
    )  # fmt: skip
    for facts in factors.layers:
        own = factors.load(facts.ordinal)
        # private, since it takes none from outside
        found._input_covariances[f"model.{facts.name}"] = own.widened_A  # noqa: SLF001
        found._gradient_covariances[f"model.{facts.name}"] = own.widened_G  # noqa: SLF001
    return found


def peer_inverse(found: Any, *, exact: bool) -> Any:  # noqa: ANN401 - as above
    """Return the peer's inverse under a damping of about our size."""
    from curvlinops import KFACInverseLinearOperator  # noqa: PLC0415 - as above

    return KFACInverseLinearOperator(found, damping=1e-6, use_exact_damping=exact, use_heuristic_damping=not exact)


def peer_gauss_newton(case: Case) -> Any:  # noqa: ANN401 - as above
    """Return the peer's GGN."""
    from curvlinops import GGNLinearOperator  # noqa: PLC0415 - as above

    return GGNLinearOperator(**arguments(case))


def _take_attention(model: Any, attention: str) -> None:  # noqa: ANN401 - of a library without types
    model.set_attn_implementation(attention)
