"""curvlinops: ``KFACLinearOperator``, whose factors its own loop computes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from curvlinops import KFACLinearOperator
from torch import Tensor, nn

from benchmarks.conformance.problem import Factors, Problem, Stream

PACKAGE = "curvlinops-for-pytorch"


class _Outputs(nn.Module):
    """The model with its outputs arranged as (terms, numbers)."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.model = problem.model
        self._outputs = problem.outputs

    def forward(self, inputs: Any) -> Tensor:  # noqa: ANN401
        """Outputs in the problem's arrangement."""
        return self._outputs(self.model, inputs)


@dataclass
class _Labelled:
    """The stream with labels as (terms,)."""

    problem: Problem
    stream: Stream

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Begin anew."""
        for inputs, targets in self.stream:
            yield inputs, self.problem.labels(targets)


def collect(problem: Problem, stream: Stream) -> Factors:
    """A and G of the wanted layers; weight and bias together, as everywhere else here."""
    model = _Outputs(problem)
    loss = nn.MSELoss(reduction="sum") if problem.loss == "mse" else nn.CrossEntropyLoss(
        reduction="sum", ignore_index=problem.ignore_index
    )  # fmt: skip
    operator = KFACLinearOperator(
        model,
        loss,
        [parameter for parameter in problem.model.parameters() if parameter.requires_grad],
        _Labelled(problem, stream),
        check_deterministic=False,
        fisher_type="empirical" if problem.fisher == "empirical" else "mc",
        mc_samples=1,
        kfac_approx="expand",
        # both are found out by further passes over the data otherwise
        num_per_example_loss_terms=problem.terms,
        num_data=problem.examples * len(stream),
        separate_weight_and_bias=False,
        batch_size_fn=lambda inputs: len(inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))),
    )
    operator.compute_kronecker_factors()
    activation, gradient = operator._input_covariances, operator._gradient_covariances  # noqa: SLF001 - it shows them nowhere else
    return {name.removeprefix("model."): (activation[name], gradient[name]) for name in activation}
