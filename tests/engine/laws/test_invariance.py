"""What may change without changing the numbers: the digests, or the factors to 1e-6 relative in float32.

Each row of the table names a change of how the data is worked through, and what it must leave.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.requests.memory import Memory
from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import digest
from engine.memory.plan import Chosen
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, relative_error, workspace

DIGESTS, ROUNDING = "digests", "≤ 1e-6 relative in float32"
VOCABULARY = 12


class Reader(nn.Module):
    """Tokens with padding, a table, a norm, two layers of one input, a convolution, a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 24, padding_idx=0)
        self.norm = nn.LayerNorm(24)
        self.q, self.k = nn.Linear(24, 24), nn.Linear(24, 24)
        self.mix = nn.Conv1d(24, 24, 3, padding=1)
        self.twice = nn.Linear(24, 24)
        self.head = nn.Linear(24, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.norm(self.table(input_ids)) * attention_mask.unsqueeze(-1)
        x = x + torch.tanh(self.q(x)) * self.k(x)
        x = x + torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.twice(torch.tanh(self.twice(x))))


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """(ids, mask, index) of 20 texts of up to 9 tokens, padded at the end; one target is ignored."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 10, (20,), generator=generator)
    mask = (torch.arange(9)[None] < lengths[:, None]).long()
    ids = torch.randint(1, VOCABULARY, (20, 9), generator=generator) * mask
    return ids, mask, torch.arange(20)


def space(chunks: int = 1, order: Tensor | None = None, **options: Any) -> Workspace:
    torch.manual_seed(0)
    ids, mask, index = (tensor if order is None else tensor[order] for tensor in rows())
    targets = torch.where(mask.bool(), ids, -100)
    targets[:, 2] = -100
    parts = [
        ({"input_ids": ids[part], "attention_mask": mask[part]}, targets[part], index[part])
        for part in torch.arange(len(index)).chunk(chunks)
    ]
    fisher = options.pop("fisher", "mc")
    return workspace(
        Reader(), parts, "causal_lm", **({"fisher": fisher, "dtype": "float32", "batch_size": 8} | options)
    )


def sliced(size: int) -> Workspace:
    made = space()
    made.options.memory = Memory(micro_batch=size)
    return made


def in_passes(*parts: tuple[str, ...]) -> Workspace:
    made = space()
    made.ports.scratch = MemoryArtifacts()
    made.resume.chosen = Chosen(parts=parts, micro_batch=8)
    return made


def offloaded(**options: Any) -> Workspace:
    made = space(**options)
    made.options.memory = Memory(offload="on")
    return made


CHANGES: list[tuple[str, Callable[[], Workspace], str]] = [
    ("a second run", space, DIGESTS),
    ("chunks of the data", lambda: space(chunks=7), DIGESTS),
    ("micro-batch of the batch's size", lambda: sliced(8), DIGESTS),
    ("three passes", lambda: in_passes(("table", "norm"), ("q", "k", "mix"), ("twice", "head")), DIGESTS),
    ("batch size 1", lambda: space(batch_size=1), ROUNDING),
    ("batch size 20", lambda: space(batch_size=20), ROUNDING),
    ("micro-batch 1", lambda: sliced(1), ROUNDING),
    ("micro-batch 3", lambda: sliced(3), ROUNDING),
    ("sums on the host", offloaded, ROUNDING),
    ("order of the examples", lambda: space(order=torch.arange(19, -1, -1)), ROUNDING),
]


def digests(whole: FactorSet) -> list[tuple[str, str, str]]:
    loaded = [whole.load(layer.ordinal) for layer in whole.layers]
    return [(factors.layer, digest(factors.A), digest(factors.G)) for factors in loaded]


def largest_error(found: FactorSet, truth: FactorSet) -> float:
    errors = [0.0]
    for layer in truth.layers:
        left, right = found.load(layer.ordinal), truth.load(layer.ordinal)
        errors += [relative_error(left.A, right.A), relative_error(left.G, right.G)]
    return max(errors)


def counts(whole: FactorSet) -> list[tuple[object, ...]]:
    return [
        (layer.name, layer.form, layer.positions, layer.terms, layer.calls, layer.shared_A_with)
        for layer in whole.layers
    ]


@functools.cache
def undisturbed() -> FactorSet:
    """Factors that every change is compared with, collected once."""
    return collect_or_read(space())


@pytest.mark.part(of=16, by=("kept",))
@pytest.mark.parametrize(("change", "made", "kept"), CHANGES, ids=[f"{name}: {kept}" for name, _, kept in CHANGES])
def test_change_leaves(change: str, made: Callable[[], Workspace], kept: str) -> None:
    truth, found = undisturbed(), collect_or_read(made())
    assert len(truth.layers) == 7
    assert counts(found) == counts(truth)
    error = largest_error(found, truth)
    print(f"{change}: {kept}; largest error {error:.1e}")  # noqa: T201 - the table, with `pytest -s`
    if kept == DIGESTS:
        assert digests(found) == digests(truth)
    else:
        assert error <= 1e-6


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("fisher", ["mc", "empirical", "type2", "forward_only"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("options", [{}, {"update_freq": 2, "ema_decay": 0.7}], ids=["average", "ema"])
def test_slices_of_a_batch_are_one_update(fisher: str, sharing: str, options: dict[str, Any]) -> None:
    first = torch.arange(12)
    made = [space(order=first, fisher=fisher, sharing=sharing, dtype="float64", **options) for _ in range(2)]
    made[1].options.memory = Memory(micro_batch=3)
    whole, cut = (collect_or_read(one) for one in made)
    assert (whole.micro_batch, cut.micro_batch) == (8, 3)
    assert (cut.updates, cut.examples) == (whole.updates, whole.examples)
    assert counts(cut) == counts(whole)
    assert largest_error(cut, whole) < 1e-12


class OwnLoss(nn.Module):
    """Returns its own mean loss over the targets that count, as a sequence model does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 6), nn.Linear(6, 12)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.table(ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_models_own_mean_loss_is_rescaled_by_each_slices_terms(size: int) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 12, (6, 5))
    # very uneven terms, and one example without any: the mean of nothing is NaN
    labels = torch.where(torch.arange(5)[None] < torch.tensor([5, 1, 0, 3, 2, 4])[:, None], ids, -100)
    model = OwnLoss()
    made = [workspace(model, [(ids, labels)], "masked_lm", "model", fisher="empirical", batch_size=6) for _ in range(2)]
    made[1].options.memory = Memory(micro_batch=size)
    whole, cut = (collect_or_read(one) for one in made)
    assert [layer.form for layer in whole.layers] == ["diagonal", "kronecker"]
    assert counts(cut) == counts(whole)
    assert largest_error(cut, whole) < 1e-12
