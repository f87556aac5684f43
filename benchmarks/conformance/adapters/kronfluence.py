"""kronfluence: its own covariance loop over wrapped modules."""

from typing import Any

from kronfluence import prepare_model
from kronfluence.arguments import FactorArguments
from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
from kronfluence.task import Task
from kronfluence.utils.state import State
from torch import Tensor, nn

from benchmarks.conformance.problem import Factors, Problem, Stream

PACKAGE = "kronfluence"


class _Task(Task):
    """The problem's loss and padding, in kronfluence's terms."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:  # noqa: ANN401, ARG002
        """The problem's own; whether it samples stands in the problem."""
        inputs, targets = batch
        return self.problem.summed_loss(self.problem.outputs(model, inputs), targets)

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:  # noqa: ANN401
        """Never asked for here."""
        return self.compute_train_loss(batch, model)

    def get_influence_tracked_modules(self) -> list[str] | None:
        """The wanted layers."""
        return list(self.problem.layers) or None

    def get_attention_mask(self, batch: Any) -> Tensor | None:  # noqa: ANN401
        """The mask, where the inputs bring one."""
        inputs, _ = batch
        return None if isinstance(inputs, Tensor) else inputs.get("attention_mask")


def collect(problem: Problem, stream: Stream) -> Factors:
    """A and G of the wanted layers, each divided by what kronfluence has counted."""
    task = _Task(problem)
    parameter = next(problem.model.parameters())
    dtype = parameter.dtype
    model = prepare_model(problem.model, task)
    arguments = FactorArguments(
        use_empirical_fisher=problem.fisher == "empirical",
        activation_covariance_dtype=dtype,
        gradient_covariance_dtype=dtype,
    )
    _, found = fit_covariance_matrices_with_loader(
        model=model,
        # it moves batches to its state's device, and leaves the model where it is
        state=State(cpu=parameter.device.type == "cpu"),
        task=task,
        loader=stream,
        factor_args=arguments,
        tracked_module_names=None,
        disable_tqdm=True,
    )
    sides = []
    for side in ("activation", "gradient"):
        counts = found[f"num_{side}_covariance_processed"]
        sides.append({name: sums / counts[name] for name, sums in found[f"{side}_covariance"].items()})
    activation, gradient = sides
    return {name: (activation[name], gradient[name]) for name in activation}
