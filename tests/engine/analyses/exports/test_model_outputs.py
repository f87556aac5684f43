"""The number of the model's outputs: refused where the head's G shows another, taken from it where none is given."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.analyses.exports.exported_file import ExportRefused
from kronoscope.local import LayersFactors, measure


class Reshaped(nn.Module):
    """A linear layer of six rows, which are the logits of three classes at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).reshape(-1, 2, 3)  # type: ignore[no-any-return]


class Narrowed(nn.Module):
    """A linear layer of seven rows, of which four are logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)[:, :4]  # type: ignore[no-any-return]


def factors_of(net: nn.Module, targets: Tensor, fisher: str) -> LayersFactors:
    torch.manual_seed(0)
    task: Any = "regression" if targets.is_floating_point() else "classification"
    collection: Any = {"fisher": fisher}
    return measure(
        net, [(torch.randn(len(targets), 5), targets)], task=task, kinds="factors", collection=collection
    ).factors


def stored(factors: LayersFactors, folder: Path, **options: Any) -> int:
    factors.export("laplace", folder / "state.pt", **options)
    return int(torch.load(folder / "state.pt", weights_only=True)["n_outputs"])


CLASSES = torch.arange(12) % 4
SQUARES = torch.linspace(-1, 1, 36).reshape(12, 3)


@pytest.mark.parametrize(
    ("outputs", "targets", "fisher"),
    [(4, CLASSES, "mc"), (4, CLASSES, "empirical"), (4, CLASSES, "type2"), (3, SQUARES, "type2")],
)
def test_another_number_than_that_of_the_head_is_refused_and_none_is_taken_from_it(
    tmp_path: Path, outputs: int, targets: Tensor, fisher: str
) -> None:
    likelihood = "regression" if targets.is_floating_point() else "classification"
    factors = factors_of(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs)), targets, fisher)
    with pytest.raises(ExportRefused) as caught:
        factors.export("laplace", tmp_path / "never", outputs=7, likelihood=likelihood)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    assert caught.value.pointer == "/export/outputs"
    assert f"`outputs` is 7, and the model has {outputs}: its head, layer `2`" in caught.value.message
    assert f"give {outputs}, or leave `outputs` out" in caught.value.message
    assert stored(factors, tmp_path, likelihood=likelihood, outputs=outputs) == outputs
    assert stored(factors, tmp_path, likelihood=likelihood) == outputs


@pytest.mark.parametrize(
    ("net", "targets", "fisher"),
    [
        (Reshaped, torch.arange(24).reshape(12, 2) % 3, "type2"),
        (Narrowed, CLASSES, "type2"),
        (lambda: nn.Linear(5, 3), SQUARES, "empirical"),
        (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh()), CLASSES, "type2"),
    ],
)
def test_a_last_layer_that_is_not_shown_to_be_the_head_decides_nothing(
    tmp_path: Path, net: Any, targets: Tensor, fisher: str
) -> None:
    likelihood = "regression" if targets.is_floating_point() else "classification"
    factors = factors_of(net(), targets, fisher)
    assert stored(factors, tmp_path, likelihood=likelihood, outputs=2) == 2
    with pytest.raises(ExportRefused, match="`outputs` is missing, and these factors do not show it"):
        factors.export("laplace", tmp_path / "never", likelihood=likelihood)  # type: ignore[arg-type]
