"""bergson: its ``CovarianceCollector`` within a loop like its own, which knows language models alone."""

import tempfile

import torch
from bergson.gradients import GradientProcessor
from bergson.hessians.kfac import CovarianceCollector
from torch import Tensor

from benchmarks.conformance.problem import Factors, Problem, Stream

PACKAGE = "bergson"


def collect(problem: Problem, stream: Stream) -> Factors:
    """A and G of the wanted layers, divided by the positions that bergson has counted."""
    model = problem.model.requires_grad_(requires_grad=False)
    # what lets gradients flow without weight gradients, as bergson's own set-up does
    first = next(iter(stream))[0]
    if isinstance(first, Tensor):
        first_inputs = first
    else:
        model.get_input_embeddings().requires_grad_(requires_grad=True)
        first_inputs = first["input_ids"]
    dtype = next(model.parameters()).dtype
    with tempfile.TemporaryDirectory() as folder:
        collector = CovarianceCollector(
            model=model,
            target_modules=set(problem.layers),
            processor=GradientProcessor(include_bias=True),
            dtype=dtype,
            path=folder,
        )
        positions = torch.ones(first_inputs.shape[:2], dtype=torch.bool)
        for inputs, targets in stream:
            kept = positions.clone() if isinstance(inputs, Tensor) else inputs["attention_mask"].bool()
            if problem.task == "causal_lm":
                # its collection mask spans every real position but each sequence's last
                kept[:, :-1] &= kept[:, 1:].clone()
                kept[:, -1] = False
            with collector.with_batch(kept):
                problem.summed_loss(problem.outputs(model, inputs), targets).backward()
            model.zero_grad()
        counts = collector.num_positions
        return {
            name: (collector.A_cov_dict[name] / counts[name], collector.S_cov_dict[name] / counts[name])
            for name in counts
            if counts[name]
        }
