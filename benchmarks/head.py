"""A head of GPT-2's vocabulary: the exact Fisher of 1024 loss terms, in 16 bits and without its matrix.

A small decoder with 50257 classes is collected under the profiler's account of every allocation; then
what is kept is asked for everything an analysis asks for, by the same account. Errors are against the
same probabilities in float64.

    python -m benchmarks.head
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import results_file
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from catalog.requests.woodbury import Woodbury
from engine.collect import collect_or_read
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace

CLASSES, TERMS, WIDTH = 50_257, 1024, 32
DAMPING = 1e-8


class Decoder(nn.Module):
    """As little as reads tokens and answers with logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.lm_head = nn.Linear(WIDTH, CLASSES, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.4)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token, of the last alone."""
        return self.lm_head(torch.tanh(self.table(ids)))  # type: ignore[no-any-return]


class Nowhere:
    """Artifacts that nothing is written to."""


def watched(run: Callable[[], Any]) -> tuple[Any, int, float]:
    """What ``run`` returns, the largest single allocation in it, and seconds."""
    begun = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        found = run()
    seconds = time.perf_counter() - begun
    recorded = trace.profiler.kineto_results.events()  # type: ignore[union-attr] # torch types it as optional
    return found, max(event.nbytes() for event in recorded if event.name() == "[memory]"), seconds


def side_of() -> SoftmaxFisher:
    """The head's G, as a collection keeps it."""
    ids = torch.randint(0, CLASSES, (TERMS // 64, 65), generator=torch.Generator().manual_seed(1))
    whole = collect_or_read(
        Workspace(
            inputs=ModelInputs(
                model=Decoder(), batches=lambda: iter([(ids, ids)]), task=Task(type="causal_lm"), examples=ids.shape[0]
            ),
            options=JobOptions(collection=Collection(fisher="mc", batch_size=2), woodbury=Woodbury(dtype="fp16")),
            ports=Ports(artifacts=Nowhere()),
        )
    )
    (facts,) = [layer for layer in whole.layers if layer.name == "lm_head"]
    side = whole.load(facts.ordinal).G
    if not isinstance(side, SoftmaxFisher):
        raise TypeError(facts.why)
    return side


def exact_solution(side: SoftmaxFisher, right: Tensor) -> Tensor:
    """``(S + λI)⁻¹ right`` by conjugate gradients on the definition in float64, preconditioned by its diagonal."""
    p = side.rows.double()
    p /= p.sum(1, keepdim=True)
    share = side.weights[:, None]
    mean = (share * p).sum(0)
    inverse = 1 / (mean + DAMPING)
    x = torch.zeros_like(right)
    residual = right.clone()
    z = inverse * residual
    direction, norm = z.clone(), residual @ z
    for _ in range(3000):
        product = (mean + DAMPING) * direction - p.T @ (side.weights * (p @ direction))
        step = norm / (direction @ product)
        x += step * direction
        residual -= step * product
        if float(residual.norm()) < 1e-13 * float(right.norm()):
            break
        z = inverse * residual
        norm, before = residual @ z, norm
        direction = z + (norm / before) * direction
    return x


def main() -> None:
    """Collect, ask, compare."""
    side, largest, collection_seconds = watched(side_of)
    right = torch.randn(CLASSES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    right -= right.mean()
    figures: dict[str, Any] = {"collection_seconds": collection_seconds, "collection_largest_bytes": largest}
    calls: dict[str, Callable[[], Any]] = {
        "trace": side.trace,
        "frobenius_norm": side.frobenius_norm,
        "spectral_norm": side.spectral_norm,
        "solve": lambda: side.solve(right[:, None], DAMPING),
        "effective_dimension": lambda: side.effective_dimensions(torch.tensor([DAMPING])),
        "spectrum": lambda: side.spectrum("lm_head"),
    }
    found = {}
    for name, call in calls.items():
        found[name], own, figures[f"{name}_seconds"] = watched(call)
        figures[f"{name}_largest_bytes"] = own
        largest = max(largest, own)
    solved = found["solve"][:, 0]
    error = float((solved - exact_solution(side, right)).norm() / solved.norm())
    figures |= {"factor_bytes": side.size_bytes, "dense_bytes": 4 * CLASSES**2, "trace": found["trace"]}
    figures |= {"largest_allocation_bytes": largest, "classes": CLASSES, "terms": side.count}
    results_file.write(
        "head",
        [
            results_file.claim(
                "MiB of the factor of 50257 classes and 1024 terms in 16 bits", side.size_bytes / 2**20, 120
            ),
            results_file.claim(
                "largest single allocation over V² numbers of 16 bits", largest / (2 * CLASSES**2), 0.05
            ),
            results_file.claim("relative error of the damped inverse at λ = 1e-8", error, 1e-6),
        ],
        figures,
    )


if __name__ == "__main__":
    main()
