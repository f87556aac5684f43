"""`fisher: empirical` is the second moment of torch's own gradients, in everything that is made of them."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from catalog.requests.collection import Collection
from kronoscope.local import load_factors, measure

Run = Callable[..., subprocess.CompletedProcess[str]]
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": functional.mse_loss,
    "bce": functional.binary_cross_entropy_with_logits,
}
EMPIRICAL = Collection(fisher="empirical", dtype="float64", batch_size=4)
"""Three batches, the last of one example."""


def net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def data(outputs: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(9, 6, dtype=torch.float64, generator=generator),
        torch.rand(9, outputs, dtype=torch.float64, generator=generator),
    )


def example_gradients(model: nn.Module, x: Tensor, y: Tensor, loss: str) -> Tensor:
    """Of each example's loss as torch takes it, (N, P)."""
    return torch.stack(
        [
            torch.cat(
                [part.flatten() for part in torch.autograd.grad(LOSSES[loss](model(own), at), list(model.parameters()))]
            )
            for own, at in zip(x, y, strict=True)
        ]
    )


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("outputs", [1, 2, 5])
@pytest.mark.parametrize("policy", ["dense", "all"])
def test_factors_and_traces_are_moments_of_torchs_gradients(loss: str, outputs: int, policy: str) -> None:
    model, (x, y) = net(outputs), data(outputs)
    found = measure(
        model, [(x, y)], task={"type": "regression", "loss": loss}, kinds=("factors",), collection=EMPIRICAL,
        woodbury={"policy": policy, "dtype": "fp32"},
    )  # fmt: skip
    f = model(x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(sum(map(LOSSES[loss], f, y)), f)  # type: ignore[call-overload] # a tensor's rows
    torch.testing.assert_close(found.factors["2"].G.double(), gradient.T @ gradient / 9, rtol=1e-5, atol=1e-9)
    own = example_gradients(model, x, y, loss).square()
    rows = found.of("factors")
    for name, columns in (("0", slice(0, 28)), ("2", slice(28, None))):
        assert rows[name].metrics.exact_trace == pytest.approx(float(own[:, columns].sum() / 9), rel=1e-12)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_spectrum_is_that_of_torchs_gradients(loss: str) -> None:
    model, (x, y) = net(), data()
    found = measure(
        model, [(x, y)], task={"type": "regression", "loss": loss}, kinds=("spectrum",), collection=EMPIRICAL,
        params={"spectrum": {"of": ["empirical"], "k": 3, "density": False, "trace": "none"}},
    )  # fmt: skip
    gradients = example_gradients(model, x, y, loss)
    exact = torch.linalg.eigvalsh(gradients.T @ gradients / 9).flip(0)
    (whole,) = [each for each in found.summary["spectrum"].curvatures if each.of == "empirical"]
    assert [each.value for each in whole.largest] == pytest.approx(exact[:3].tolist(), rel=1e-9)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_natural_gradient_of_rows_is_that_of_the_dense_factors(loss: str) -> None:
    """G's own rows are the gradient's, so that `rows` is the same direction as any other way."""
    model, (x, y) = net(), data()
    norms = []
    for policy in ("all", "dense"):
        found = measure(
            model, [(x, y)], task={"type": "regression", "loss": loss}, kinds=("natural_gradient",),
            collection=EMPIRICAL, woodbury={"policy": policy, "dtype": "fp32"},
            stabilisation={"damping": 1e-2}, params={"natural_gradient": {"damping": "factored"}},
        )  # fmt: skip
        norms.append([row.metrics.gradient_norm for row in found.of("natural_gradient").values()])
    gradients = example_gradients(model, x, y, loss).mean(0)
    exact = [float(part.norm()) for part in (gradients[:28], gradients[28:])]
    assert norms[0] == pytest.approx(exact, rel=1e-6)
    assert norms[1] == pytest.approx(exact, rel=1e-12)


def test_a_job_has_the_same_meaning(folder: Path, kronoscope: Run) -> None:
    (folder / "numbers_for_kronoscope.py").write_text(
        "import torch\n\n\ndef data():\n    generator = torch.Generator().manual_seed(1)\n"
        "    yield torch.randn(9, 6, generator=generator), torch.rand(9, 3, generator=generator)\n"
    )
    done = kronoscope(
        "run", "job.yaml", "--output", "out", "--set", "task.type=regression", "--set", "collection.fisher=empirical",
        "--set", "data.factory=numbers_for_kronoscope:data", "--set", "kind=factors", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    generator = torch.Generator().manual_seed(1)
    x, y = (draw(9, size, generator=generator).double() for draw, size in ((torch.randn, 6), (torch.rand, 3)))
    gradient: Any = 2 * (model(x) - y).detach() / 3
    torch.testing.assert_close(load_factors(folder / "out")["2"].G.double(), gradient.T @ gradient / 9)
    row = json.loads((folder / "out" / "results.json").read_text())["layers"][1]["metrics"]
    exact = float(example_gradients(model, x, y, "mse")[:, 56:].square().sum() / 9)
    assert row["exact_trace"] == pytest.approx(exact, rel=1e-10)
