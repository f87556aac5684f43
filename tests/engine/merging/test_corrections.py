"""EK-FAC's eigenvalues over pieces are those of one pass over all examples, in the basis of the merged factors."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.artifacts import Artifacts
from engine.collect import collect_or_read
from engine.errors import NotMergeable
from engine.factors.factor_set import FactorSet
from engine.measurement.piece_storage import store_bases, store_correction
from engine.workspace import Workspace
from tests.divided import joining, piece, stored
from tests.oracles import MemoryArtifacts, ggn_block, relative_error, row_vector, workspace

EXAMPLES = 14
BOUNDS = ((0, 4), (4, 12), (12, 14))


class Net(nn.Module):
    """A norm, which needs no pass, and two layers of one input, which share a basis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.q, self.k = nn.Linear(4, 3), nn.Linear(4, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(torch.tanh(self.q(x)) * self.k(x))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(EXAMPLES, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (EXAMPLES,), generator=generator)


def job(seed: int = 0, **options: Any) -> Workspace:
    torch.manual_seed(seed)
    made = workspace(Net().double(), [data()], "classification", batch_size=2, ekfac=True, **options)
    made.inputs.examples = EXAMPLES
    return made


def basis(pieces: list[MemoryArtifacts]) -> MemoryArtifacts:
    made = joining(job, pieces)
    store_bases(made)
    assert isinstance(made.ports.artifacts, MemoryArtifacts)
    return made.ports.artifacts


def correction(bases: Artifacts, begin: int, end: int, seed: int = 0) -> MemoryArtifacts:
    made = piece(partial(job, seed), begin, end)
    made.inputs.bases = bases
    store_correction(made)
    assert isinstance(made.ports.artifacts, MemoryArtifacts)
    return made.ports.artifacts


def corrected(pieces: list[MemoryArtifacts], bases: Artifacts, corrections: list[MemoryArtifacts]) -> FactorSet:
    made = joining(job, pieces)
    made.inputs.bases, made.inputs.stored_corrections = bases, tuple(corrections)
    return collect_or_read(made)


def test_the_correction_is_the_diagonal_of_the_curvature_in_the_merged_basis() -> None:
    pieces = [stored(job, begin, end) for begin, end in BOUNDS]
    bases = basis(pieces)
    found = corrected(pieces, bases, [correction(bases, begin, end) for begin, end in BOUNDS])
    truth = collect_or_read(job())
    assert found.load_corrected is not None
    assert truth.load_corrected is not None
    model, (x, y) = job().inputs.model, data()
    assert model is not None
    for facts in found.layers:
        own, undivided = found.load_corrected(facts.ordinal), truth.load_corrected(facts.ordinal)
        # rotations keep lengths, whatever basis was found
        total = float(undivided.eigenvalues.sum())
        assert float(own.eigenvalues.sum()) == pytest.approx(total, rel=1e-12)
        if facts.form != "kronecker":
            assert torch.allclose(own.eigenvalues, undivided.eigenvalues, rtol=1e-10, atol=1e-14 * total)
            continue
        assert own.eigenvectors_A is not None
        assert own.eigenvectors_G is not None
        names = (f"{facts.name}.weight", f"{facts.name}.bias")
        block = ggn_block(model, x, y, "cross_entropy", names, row_vector(*names))
        Q = torch.kron(own.eigenvectors_G, own.eigenvectors_A)
        exact = (Q.T @ block @ Q).diagonal().reshape(own.eigenvalues.shape)
        assert relative_error(own.eigenvalues, exact) <= 1e-10
        factors = found.load(facts.ordinal)
        rotated = own.eigenvectors_A.T @ factors.A @ own.eigenvectors_A
        assert float((rotated - rotated.diagonal().diag()).norm()) <= 1e-12 * float(factors.A.norm())


def test_what_does_not_belong_is_refused() -> None:
    pieces = [stored(job, begin, end) for begin, end in BOUNDS]
    bases = basis(pieces)
    parts = [correction(bases, begin, end) for begin, end in BOUNDS]
    with pytest.raises(NotMergeable, match="in two corrections"):
        corrected(pieces, bases, [*parts, parts[1]])
    with pytest.raises(NotMergeable, match="are over 6 examples, and the factors over 14"):
        corrected(pieces, bases, [parts[0], parts[2]])
    with pytest.raises(NotMergeable, match="of another model than the factors"):
        correction(bases, 0, 4, seed=1)
    other = basis([stored(partial(job, 1), 0, EXAMPLES)])
    with pytest.raises(NotMergeable, match="was made in other eigenbases"):
        corrected(pieces, other, parts)
