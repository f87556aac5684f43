"""bergson: its ``CovarianceCollector`` within a loop like its own, which knows language models alone."""

import tempfile
from typing import Any

import torch
from bergson.gradients import GradientProcessor
from bergson.hessians.kfac import CovarianceCollector
from torch import Tensor, nn

from benchmarks.conformance.problem import Factors, Problem, Stream

PACKAGE = "bergson"


def collect(problem: Problem, stream: Stream) -> Factors:
    """A and G of the wanted layers, divided by the positions that bergson has counted."""
    model = problem.model.requires_grad_(requires_grad=False)
    # what lets gradients flow without weight gradients, as bergson's own set-up does
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for table in tables[:1]:
        table.requires_grad_(requires_grad=True)
    with tempfile.TemporaryDirectory() as folder:
        collector = CovarianceCollector(
            model=model,
            target_modules=set(problem.layers) or None,
            processor=GradientProcessor(include_bias=True),
            dtype=next(model.parameters()).dtype,
            path=folder,
        )
        for inputs, targets in stream:
            fed = inputs if tables else inputs.clone().requires_grad_()
            with collector.with_batch(_positions(problem, inputs)):
                problem.summed_loss(problem.outputs(model, fed), targets).backward()
            model.zero_grad()
        counts = collector.num_positions
        return {
            name: (collector.A_cov_dict[name] / counts[name], collector.S_cov_dict[name] / counts[name])
            for name in counts
            if counts[name]
        }


def _positions(problem: Problem, inputs: Any) -> Tensor:  # noqa: ANN401 - a tensor, or a mapping of them
    """The collection mask (N, T): every real position, in a language model but each sequence's last."""
    if isinstance(inputs, Tensor):
        return torch.ones(inputs.shape[:2], dtype=torch.bool)
    kept = inputs["attention_mask"].bool()
    if problem.task == "causal_lm":
        kept[:, :-1] &= kept[:, 1:].clone()
        kept[:, -1] = False
    return kept
