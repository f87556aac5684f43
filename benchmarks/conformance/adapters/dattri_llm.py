"""dattri-llm: its ``KroneckerCovarianceCallback`` on a hook manager, in a loop like that of its users."""

from dattri_llm.gradient.callbacks import KroneckerCovarianceCallback
from dattri_llm.gradient.hooks import HookManager, HookManagerConfig
from torch import nn

from benchmarks.conformance.problem import Factors, Problem, Stream

PACKAGE = "dattri-llm"


def collect(problem: Problem, stream: Stream) -> Factors:
    """A and G of the wanted layers; its hooks for linear layers compute no weight gradients."""
    model = problem.model
    families = {
        name: "invasive_linear_io" if isinstance(model.get_submodule(name), nn.Linear) else "linear_io"
        for name in problem.layers
    }
    callback = KroneckerCovarianceCallback()
    manager = HookManager(model, HookManagerConfig(hook_types=families), callbacks=[callback])
    with manager.collect(deregister_on_exit=True):
        for inputs, targets in stream:
            problem.summed_loss(problem.outputs(model, inputs), targets).backward()
            model.zero_grad()
    return callback.result()
