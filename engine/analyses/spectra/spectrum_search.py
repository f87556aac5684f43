"""The spectrum search of one curvature: extreme eigenvalues, density and trace share every pass over the data.

Each of the three asks for products with vectors of its own. All that they ask for at a time is multiplied together, so
that a pass serves them all; memory says how many vectors go through the model at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from catalog.analyses.spectrum import SpectrumParams
from engine.operators.extreme_eigenvalues import ExtremeEigenvalues, SearchOptions
from engine.operators.krylov.iteration import Iteration
from engine.operators.quadrature import LanczosQuadrature, QuadratureOptions
from engine.operators.traces import HutchPlusPlus, TraceOptions, XTrace


@dataclass(kw_only=True)
class SpectrumSearch:
    """The search of one curvature."""

    size: int
    params: SpectrumParams
    seed: int
    dtype: torch.dtype
    length: int
    """Basis vectors of the search for the extreme eigenvalues."""
    columns: int
    """Vectors that are multiplied in one pass."""
    device: torch.device
    products: int = 0
    """Vectors that were multiplied."""
    passes: int = 0
    ends: ExtremeEigenvalues = field(init=False)
    quadrature: LanczosQuadrature | None = None
    trace: XTrace | HutchPlusPlus | None = None

    def __post_init__(self) -> None:
        """Begin with random vectors keyed by the seed."""
        options = SearchOptions(
            count=min(self.params.count, self.size),
            end=self.params.end,
            tolerance=self.params.tolerance,
            seed=self.seed,
            dtype=self.dtype,
            most_products=self.params.most_products,
            length=self.length,
        )
        self.ends = ExtremeEigenvalues(self.size, options, self.device)
        if self.params.density:
            steps = QuadratureOptions(
                probes=self.params.probes,
                steps=min(self.params.steps, self.size),
                seed=self.seed,
                dtype=self.dtype,
            )
            self.quadrature = LanczosQuadrature(self.size, steps, self.device)
        if self.params.trace != "none":
            kind = XTrace if self.params.trace == "xtrace" else HutchPlusPlus
            sketch = TraceOptions(products=self.params.trace_products, seed=self.seed, dtype=self.dtype)
            self.trace = kind(self.size, sketch, self.device)

    @property
    def parts(self) -> dict[str, Iteration]:
        """All that ask for products, by name."""
        named: dict[str, Iteration | None] = {"ends": self.ends, "quadrature": self.quadrature, "trace": self.trace}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def done(self) -> bool:
        """Whether everything is known."""
        return all(part.done for part in self.parts.values())

    def step(self, multiply: Callable[[Tensor], Tensor]) -> None:
        """Multiply everything that is asked for; the vectors and their products are held.

        ``multiply`` returns the product with vectors (n, k), k at most ``columns``, in one pass over the data.
        """
        asking = [part for part in self.parts.values() if not part.done]
        vectors = torch.cat([part.vectors for part in asking], dim=1)
        products = [multiply(part) for part in torch.split(vectors, self.columns, dim=1)]
        self.products += vectors.shape[1]
        self.passes += len(products)
        widths = [part.vectors.shape[1] for part in asking]
        del vectors
        for part, own in zip(asking, torch.split(torch.cat(products, dim=1), widths, dim=1), strict=True):
            part.advance(own)

    def state(self) -> dict[str, Tensor]:
        """Return all that is needed to go on, as views that the next step changes, by names of part and tensor."""
        return {f"{name}.{key}": tensor for name, part in self.parts.items() for key, tensor in part.state().items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from what ``state`` gave of a search with these options; ``ValueError`` if it is another search's."""
        for name, part in self.parts.items():
            part.restore(
                {key.removeprefix(f"{name}."): each for key, each in state.items() if key.startswith(f"{name}.")}
            )
