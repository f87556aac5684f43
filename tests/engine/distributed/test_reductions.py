"""Reductions of gradient rows: bytes by the formulas, exact solves, and the recipe that is wrong."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.accumulation.gradient_rows import GradientRows, RowStorage
from engine.collection.ranks.rows import RowFacts, reduce_rows
from engine.distributed.group import join
from engine.distributed.traffic import choose_reduction, held_bytes, sent_bytes
from engine.distributed.transfers import Label, exchange, run_together, sum_triangle_
from engine.factors.low_rank import LowRank
from tests.engine.distributed.rank_processes import run_ranks

ROOT = Path(__file__).resolve().parents[3]
SIZE, ROWS = 301, 64
UNEVEN = (20, 0, 33, 11)
DAMPING = 1e-3


def gradients() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64)


def right_side() -> Tensor:
    return torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def kept(rows: Tensor) -> GradientRows:
    cpu = torch.device("cpu")
    storage = RowStorage(capacity=ROWS, dtype=rows.dtype, working=rows.dtype, arrive=cpu, stand=cpu)
    found = GradientRows.empty(1, rows.shape[1], storage)
    found.add_(rows)
    return found


def parts(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    counts = UNEVEN if size == 4 else (UNEVEN[0] + UNEVEN[1], UNEVEN[2] + UNEVEN[3])
    return rows.split(list(counts))


def reduced(rank: int, size: int, mode: str) -> dict[str, Any]:
    ranks = join(torch.device("cpu"))
    own = kept(parts(gradients(), size)[rank])
    facts = ranks.gather(RowFacts.of(own), "facts")
    (made,) = run_together([reduce_rows(ranks, own, facts, "head", gram=mode == "gram")])
    (side,) = own.finished(float(ROWS))
    assert isinstance(side, LowRank)
    moved = ranks.traffic.moved
    return {
        "made": made,
        "rows": side.scaled(torch.float64),
        "gram": side.gram(),
        "solved": side.solve(right_side(), DAMPING),
        "sent": moved["head", mode].sent,
        "held": ranks.traffic.held.get(("head", mode)),
    }


def moved_dtypes(rank: int, size: int) -> list[Tensor]:
    ranks = join(torch.device("cpu"))
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64):
        own = torch.full((3,), rank + 1, dtype=dtype)
        found.append(torch.cat(exchange(ranks, [own] * size, [3] * size, Label("a", "test")).wait()))
    matrix = torch.arange(25.0, dtype=torch.float32).view(5, 5) * (rank + 1)
    run_together([sum_triangle_(ranks, matrix, Label("a", "G"))])
    owned = torch.ones(2, 5, 5) * (rank + 1)
    run_together([sum_triangle_(ranks, owned, Label("b", "G"), owner=1)])
    return [*found, matrix, owned]


def everything(rank: int, size: int) -> dict[str, Any]:
    return {**{mode: reduced(rank, size, mode) for mode in ("gram", "gather")}, "dtypes": moved_dtypes(rank, size)}


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> list[Any]:
    results = run_ranks(request.param, everything, request.param)
    for each in results:
        if isinstance(each, Exception):
            raise each
    return results


@pytest.mark.parametrize("mode", ["gram", "gather"])
def test_solves_with_the_rows_of_all_ranks_are_those_of_one(mode: str, found: list[Any]) -> None:
    rows = gradients() / ROWS**0.5
    dense = rows.T @ rows + DAMPING * torch.eye(SIZE, dtype=torch.float64)
    expected = torch.linalg.solve(dense, right_side())
    for each in found:
        assert each[mode]["made"] == mode
        assert float((each[mode]["gram"] - rows @ rows.T).norm() / (rows @ rows.T).norm()) <= 1e-13
        assert torch.equal(each[mode]["rows"], rows)
        assert float((each[mode]["solved"] - expected).norm() / expected.norm()) <= 1e-10


@pytest.mark.parametrize("mode", ["gram", "gather"])
def test_the_bytes_are_those_of_the_formulas(mode: str, found: list[Any]) -> None:
    expected = sent_bytes(mode, ranks=len(found), rows=ROWS, size=SIZE, item=8)  # type: ignore[arg-type]
    mean = sum(each[mode]["sent"] for each in found) / len(found)
    # beside the rows themselves: a scale of each, eight bytes
    scales = sum(8 * ROWS for _ in found[1:]) / len(found)
    assert mean - scales == pytest.approx(expected, rel=0.02)
    held = held_bytes(mode, ranks=len(found), rows=ROWS, size=SIZE, item=8)  # type: ignore[arg-type]
    assert sum(each[mode]["held"] for each in found) / len(found) == pytest.approx(held, rel=0.01)


def test_any_dtype_moves_and_sums_keep_the_lower_triangle(found: list[Any]) -> None:
    size, total = len(found), sum(range(1, len(found) + 1))
    base = torch.arange(25.0).view(5, 5)
    for rank, each in enumerate(found):
        *dtypes, matrix, owned = each["dtypes"]
        for values in dtypes:
            assert values.tolist() == [place + 1 for place in range(size) for _ in range(3)]
        assert torch.equal(matrix, torch.where(torch.ones(5, 5).triu() > 0, base * total, base * (rank + 1)))
        expected = total if rank == 1 else rank + 1
        assert bool((owned.triu() == torch.full((2, 5, 5), float(expected)).triu()).all())


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_sum_of_local_gram_matrices_is_wrong(ranks: int) -> None:
    """The recipe that scripts copy: all-reduce each rank's own ``U_r U_rᵀ``, and solve with it and one's own rows."""
    rows, damping = gradients() / ROWS**0.5, 0.1
    eye = torch.eye(SIZE, dtype=torch.float64)
    own = rows.chunk(ranks)
    naive = torch.stack([part @ part.T for part in own]).sum(0)
    inner = damping * torch.eye(naive.shape[0], dtype=torch.float64) + naive
    inverses = [(eye - part.T @ torch.linalg.solve(inner, part)) / damping for part in own]
    true = torch.linalg.inv(rows.T @ rows + damping * eye)
    assert min(float((each - true).norm() / true.norm()) for each in inverses) >= 0.38
    gradient = rows.T @ right_side()[:ROWS]
    directions = [each @ gradient for each in inverses]
    assert min(float((each - true @ gradient).norm() / (true @ gradient).norm()) for each in directions) >= 30
    assert float((directions[0] - directions[1]).norm() / (true @ gradient).norm()) >= 5


@pytest.mark.parametrize(
    ("rows", "size", "ranks", "chosen"),
    [(512, 50257, 2, "gram"), (2048, 50257, 4, "gram"), (290, 300, 2, "gather"), (0, 300, 4, "gram")],
)
def test_auto_sends_the_fewer_bytes(rows: int, size: int, ranks: int, chosen: str) -> None:
    assert choose_reduction("auto", rows=rows, size=size, ranks=ranks) == chosen


def test_the_formulas_count_what_the_mathematics_does() -> None:
    sizes = {"ranks": 4, "rows": 2048, "size": 50257}
    assert sent_bytes("gather", **sizes, item=4) / 2**20 == pytest.approx(294, abs=1)
    assert sent_bytes("dense", **sizes, item=4) / 2**20 == pytest.approx(7226, abs=2)
    # the Gram matrix is summed in float64, twice the bytes of float32
    assert sent_bytes("gram", **sizes, item=4) / 2**20 == pytest.approx(86 + 12, abs=1)


def test_of_what_computes_one_room_alone_imports_torch_distributed() -> None:
    importers = set()
    for package in ("engine", "kronoscope", "worker", "api", "jobs", "catalog"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "torch.distributed" in text else ():
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if any(name.startswith("torch.distributed") for name in names):
                    importers.add(path.relative_to(ROOT).parent.as_posix())
    assert importers == {"engine/distributed"}
