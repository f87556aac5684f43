"""Second names: parameters that hang on a module besides the one that uses them.

BERT's prediction head keeps its decoder's bias under a name of its own. Whether a module only keeps
a parameter or computes with it shows when the second name holds NaN for a dry run: an output that
stays as it was has not read it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from engine.curvature.broadcast import close
from engine.curvature.layers.coverage import Alias
from engine.errors import EngineError


def read_aliases(aliases: Sequence[Alias], run: Callable[[], Tensor]) -> frozenset[str]:
    """Layers whose parameters are computed with under a second name too; ``run`` returns the model's outputs."""
    plain = run()

    def matters(some: Sequence[Alias]) -> bool:
        with _blotted(some):
            try:
                return not close(run(), plain)
            except EngineError:
                return True

    if not matters(aliases):
        return frozenset()
    return frozenset(alias.layer for alias in aliases if matters((alias,)))


@contextlib.contextmanager
def _blotted(aliases: Sequence[Alias]) -> Iterator[None]:
    """Put NaN behind the second names; a view of one number, whatever the parameter's size."""
    own = [(alias.module._parameters, alias.key) for alias in aliases]  # noqa: SLF001 - own parameters, with tied ones
    kept = [(parameters, key, parameters[key]) for parameters, key in own]
    try:
        for parameters, key, parameter in kept:
            if parameter is not None:
                blot = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
                parameters[key] = nn.Parameter(blot.expand(parameter.shape), requires_grad=False)
        yield
    finally:
        for parameters, key, parameter in kept:
            parameters[key] = parameter
