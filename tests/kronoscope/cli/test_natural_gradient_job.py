"""A natural gradient as a job: its directions on disk, and the same from stored factors with a gradient from a file."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kronoscope.local import operator

Run = Callable[..., subprocess.CompletedProcess[str]]
ASKED = ("--set", "kind=[factors, natural_gradient]", "--set", "keep=[directions]",
         "--set", "natural_gradient.power=[1.0, 0.5]")  # fmt: skip


def mean_gradient() -> dict[str, Tensor]:
    """That of the folder's model and data, by torch alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).double()
    loss = nn.functional.cross_entropy(model(inputs), torch.arange(40) % 3)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def test_directions_on_disk_are_the_operators_powers_of_torchs_gradient(folder: Path, kronoscope: Run) -> None:
    done = kronoscope("run", "job.yaml", "--output", "out", *ASKED)
    assert done.returncode == 0, done.stderr
    assert "cos α=0.5" in done.stdout
    assert "natural_gradient: 2 layers; 100.0% of 83 trainable parameters covered" in done.stdout
    gradient = mean_gradient()
    whole = operator(folder / "out", damping="exact", stabilisation={"damping": 1e-4})
    for power in (1.0, 0.5):
        found = load_file(folder / "out" / "artifacts" / "directions" / f"{power!r}.safetensors")
        expected = whole.power(-power).matvec(gradient)
        assert set(found) == set(gradient)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-8 * float(expected[name].abs().max()))
    stages = json.loads((folder / "out" / "artifacts" / "memory_curve.json").read_text())["stages"]
    assert "natural_gradient" in [stage["stage"] for stage in stages]

    # the same factors again, with the gradient from a file
    save_file(gradient, folder / "gradient.safetensors")
    (folder / "again.yaml").write_text(
        "kind: natural_gradient\nfactors: {path: out}\nkeep: [directions]\nstabilisation: {damping: 1e-4}\n"
        "natural_gradient: {power: [1.0, 0.5], gradient: {path: gradient.safetensors}}\n"
    )
    again = kronoscope("run", "again.yaml", "--output", "again", "--json")
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout)["summary"]["natural_gradient"]
    assert summary["gradient"] == "file"
    for power in (1.0, 0.5):
        first, second = (
            load_file(folder / name / "artifacts" / "directions" / f"{power!r}.safetensors")
            for name in ("out", "again")
        )
        for name, tensor in first.items():
            torch.testing.assert_close(second[name], tensor, rtol=1e-9, atol=1e-9 * float(tensor.abs().max()))


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"0.weight": torch.zeros(8, 6)}, "the gradient has no tensor `0.bias` of shape (8,)"),
        ({"0.weight": torch.zeros(8, 6, dtype=torch.int32)}, "`0.weight` of gradient.safetensors is of type I32"),
        (None, "gradient.safetensors does not exist on this machine"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_anything_is_collected(
    folder: Path, kronoscope: Run, tensors: dict[str, Tensor] | None, said: str
) -> None:
    if tensors is not None:
        save_file(tensors, folder / "gradient.safetensors")
    done = kronoscope(
        "run", "job.yaml", "--output", "out", *ASKED,
        "--set", "natural_gradient.gradient={path: gradient.safetensors}",
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr
    assert "collection:" not in done.stdout
