"""The digest of a model changes with what it computes from, and with nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from worker.execution.input_digests import weights_digest


def digest(weight: Tensor, **buffers: Tensor) -> str:
    model = nn.Linear(1, 1)
    model.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    model.bias = None
    for name, tensor in buffers.items():
        model.register_buffer(name, tensor)
    return weights_digest(model)


WEIGHT = torch.arange(6.0).reshape(2, 3)
CHANGES: dict[str, Callable[[], str]] = {
    "one unit in the last place": lambda: digest(torch.nextafter(WEIGHT, torch.tensor(9.0))),
    "another sign of zero": lambda: digest(torch.where(WEIGHT == 0, -0.0, WEIGHT)),
    "another dtype": lambda: digest(WEIGHT.double()),
    "another shape": lambda: digest(WEIGHT.reshape(3, 2)),
    "a buffer": lambda: digest(WEIGHT, mean=torch.zeros(2)),
    "the buffer by another name": lambda: digest(WEIGHT, mode=torch.zeros(2)),
}


def test_every_change_of_a_weight_or_a_buffer_shows() -> None:
    found = {change: made() for change, made in CHANGES.items()} | {"none": digest(WEIGHT)}
    assert len(set(found.values())) == len(found)


def test_where_its_values_stand_in_memory_does_not_show() -> None:
    assert digest(WEIGHT.t().contiguous().t()) == digest(WEIGHT)


@pytest.mark.parametrize("made", [Tensor.conj, lambda plain: plain.conj().imag], ids=["conjugated", "negated"])
def test_a_view_is_its_values(made: Callable[[Tensor], Tensor]) -> None:
    view = made(torch.tensor([1 + 2j, 3 - 1j]))
    assert view.is_conj() or view.is_neg()
    assert digest(WEIGHT, table=view) == digest(WEIGHT, table=view.resolve_conj().resolve_neg())


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_a_quantised_buffer_is_what_it_stands_for() -> None:
    coarse, fine, shifted = (
        torch.quantize_per_tensor(values, scale, 0, torch.qint8)
        for values, scale in ((WEIGHT, 0.5), (WEIGHT, 0.25), (WEIGHT + 1, 0.5))
    )
    assert digest(WEIGHT, table=coarse) == digest(WEIGHT, table=coarse.clone())
    assert digest(WEIGHT, table=coarse) == digest(WEIGHT, table=fine)
    assert digest(WEIGHT, table=coarse) != digest(WEIGHT, table=shifted)
