"""Semiseparable matrices on a GPU: every verb equals that of the host, and offloaded tensors are pinned."""

import pytest
import torch

from engine.memory.offload_store import OffloadStore
from engine.semiseparable.construct_sss import construct_sss
from engine.semiseparable.fit import fit_tridiagonal_low_rank
from tests.engine.semiseparable.structures import COMPLEX, REAL, Draw, sss, tridiagonal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
@pytest.mark.parametrize("kind", ["tridiagonal", "sss"])
def test_verbs_are_those_of_the_host(kind: str, dtype: torch.dtype) -> None:
    matrix, dense = tridiagonal(131, 3, dtype) if kind == "tridiagonal" else sss(131, 16, 3, dtype)
    there = matrix.to(CUDA)
    x = Draw(9, dtype)(131, 5)
    for found, wanted in (
        (there.matvec(x.to(CUDA)), dense @ x),
        (there.rmatvec(x.to(CUDA)), dense.T @ x),
        (there.solve(x.to(CUDA)), torch.linalg.solve(dense, x)),
        (there.slogdet()[1], torch.linalg.slogdet(dense)[1]),
        (there.inverse_diagonal(), torch.linalg.inv(dense).diagonal()),
    ):
        assert found.device.type == "cuda"
        assert float((found.cpu() - wanted).abs().max()) <= 1e-10 * max(1.0, float(wanted.abs().max()))


def test_fits_are_made_there() -> None:
    i = torch.arange(300, dtype=REAL, device=CUDA)
    dense = torch.exp(-0.5 * ((i[:, None] - i) / 30) ** 2)
    matrix = construct_sss(dense, block=16, order=5)
    error = float((matrix.to_dense() - dense).norm())
    assert matrix.D.device.type == "cuda"
    assert matrix.error_bound is not None
    assert error <= matrix.error_bound
    fitted = fit_tridiagonal_low_rank(dense, 8)
    host = fit_tridiagonal_low_rank(dense.cpu(), 8)
    assert fitted.matrix.device.type == "cuda"
    assert fitted.relative_error == pytest.approx(host.relative_error, rel=1e-3)


def test_offloaded_tensors_are_pinned() -> None:
    store = OffloadStore(capacity_bytes=2**20)
    tensor = torch.randn(100, 7, device=CUDA)
    store.offload("U", tensor)
    assert torch.equal(store.load("U", CUDA), tensor)
    assert torch.equal(store.load("U", CUDA), tensor)
    found = store.statistics()
    assert found["pinned"] is True
    assert found["hit_rate"] == 0.5
