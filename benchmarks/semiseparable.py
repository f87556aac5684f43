"""Semiseparable matrices: speed and memory beside dense products, and the figures that circulate about them.

    python -P -m benchmarks.semiseparable           # measures, and stores benchmarks/results/semiseparable.json
    python -P -m benchmarks.semiseparable --docs    # the same, and the table of docs/circulating-figures.md
    python -P -m benchmarks.semiseparable --docs --counted    # the table alone, whose figures are counted

One thread, float32; ratios are within one run. A claim that fails is stored as false.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import results_file
from benchmarks.page_table import write_table
from engine.memory.offload_store import OffloadStore
from engine.semiseparable.block_sss import BlockSSS
from engine.semiseparable.construct_sss import construct_sss
from engine.semiseparable.partition import scaling, share_rows
from engine.semiseparable.semiseparable_matrix import default_rank, level_ranks
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank, formula_bytes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "circulating-figures.md"
NAME = "semiseparable"
SIZES = tuple(2**k for k in range(9, 18))


def seconds_of(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the processor seconds of the fastest of several runs."""
    work()
    best = float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best


def random_sss(size: int, block: int, order: int) -> BlockSSS:
    """Return a matrix of random generators whose states do not grow."""
    generator = torch.Generator().manual_seed(0)
    m = -(-size // block)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    square = torch.eye(order).expand(m, -1, -1) * 0.9
    tall = (m, block, order)
    return BlockSSS(
        size, D=normal(m, block, block), U=normal(*tall), W=square, V=normal(*tall), P=normal(*tall), R=square,
        Q=normal(*tall),
    )  # fmt: skip


def random_tridiagonal(size: int, rank: int) -> TridiagonalLowRank:
    """Return a matrix of random tensors."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((size,), (size - 1,), (size - 1,), (size, rank), (size, rank))
    diagonal, lower, upper, U, V = (torch.randn(shape, generator=generator) for shape in shapes)
    return TridiagonalLowRank(diagonal, lower, upper, U, V)


def speed() -> dict[str, Any]:
    """Return seconds of products and of the construction, beside dense products."""
    size, block, order, columns = 32_768, 16, 4, 64
    sss = random_sss(size, block, order)
    rank = round((block + 4 * order + 2 * order**2 / block - 3) / 2)
    tridiagonal = random_tridiagonal(size, rank)
    x = torch.randn(size, columns, generator=torch.Generator().manual_seed(1))
    own = {
        "block_sss": seconds_of(lambda: sss.matvec(x)),
        "tridiagonal_lowrank": seconds_of(lambda: tridiagonal.matvec(x)),
    }
    small = 8192
    dense, part = torch.randn(small, small), x[:small]
    scaled = seconds_of(lambda: dense @ part, 3) * (size / small) ** 2
    n = 4096
    i = torch.arange(n, dtype=torch.float32)
    kernel = 1 / (1 + (i[:, None] - i).abs())
    built = seconds_of(lambda: construct_sss(kernel, block=16, order=8), 1)
    cube = seconds_of(lambda: kernel @ kernel, 1)
    construction = {"size": n, "block": 16, "order": 8, "seconds": built, "cube_seconds": cube, "ratio": built / cube}
    return {
        "product": {
            "size": size, "columns": columns, "block": block, "order": order, "rank": rank,
            "numbers_per_row": {each.kind: each.size_bytes / 4 / size for each in (sss, tridiagonal)},
            "seconds": own | {"dense, scaled from 8192": scaled},
            "sss_over_tridiagonal": own["block_sss"] / own["tridiagonal_lowrank"],
            "dense_over_sss": scaled / own["block_sss"],
            "dense_over_tridiagonal": scaled / own["tridiagonal_lowrank"],
        },
        "construction": construction,
    }  # fmt: skip


_CHILD = """
import sys, time
import torch
torch.set_num_threads(1)
from engine.semiseparable.construct_sss import construct_sss
size = int(sys.argv[1])
i = torch.arange(size, dtype=torch.float64)
rows = lambda start, stop: 1 / (1 + (i[start:stop, None] - i).abs())
construct_sss(lambda start, stop: rows(start, stop)[:, :256], 256, block=32, order=8)

def kibibytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

# the peak of a process begins with that of the one that started it
open("/proc/self/clear_refs", "w").write("5")
before, begun = kibibytes("VmRSS"), time.monotonic()
matrix = construct_sss(rows, size, block=32, order=8)
print(kibibytes("VmHWM") - before, time.monotonic() - begun, matrix.error_bound)
"""


def memory() -> dict[str, Any]:
    """Return bytes of a construction by callback in a process of its own, of shares, and of mixed precision."""
    size = 32_768
    command = [sys.executable, "-P", "-c", _CHILD, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)  # noqa: S603 - our own
    kibibytes, seconds, bound = map(float, done.stdout.split())
    n, ranks = 8192, 4
    whole = random_tridiagonal(n + 3, default_rank(n))
    largest = max(share_rows(whole, rank, ranks).size_bytes for rank in range(ranks))
    mixed = {}
    for each in SIZES:
        matrix = random_tridiagonal(each, default_rank(each))
        narrow = matrix.rounded(torch.float16)
        mixed[each] = matrix.size_bytes / (
            narrow.size_bytes - (0 if narrow.exponents is None else narrow.exponents.nbytes)
        )
    beyond = 1024 * int(kibibytes)
    return {
        "callback": {"size": size, "bytes_beyond_the_process": beyond, "seconds": seconds, "bound": bound},
        "rows_over_ranks": {
            "size": n + 3, "ranks": ranks, "largest_share": largest / whole.size_bytes,
            "rows_share": -(-(n + 3) // ranks) / (n + 3), "bytes": largest, "whole_bytes": whole.size_bytes,
        },
        "float32_over_mixed": mixed,
    }  # fmt: skip


def offload() -> dict[str, Any]:
    """Return seconds of a product with U and V on the host, and without, as found on this machine."""
    size = 32_768
    matrix = random_tridiagonal(size, default_rank(size))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there, store = matrix.to(device), OffloadStore(0)
    store.offload("U", matrix.U)
    store.offload("V", matrix.V)
    found = {}
    for columns in (1, 64, 4096):
        x = torch.randn(size, columns, device=device)

        def fetched(given: torch.Tensor = x) -> torch.Tensor:
            loaded = {name: store.load(name, device) for name in ("U", "V")}
            return TridiagonalLowRank.read(there.tensors() | loaded, {}).matvec(given)

        def stays(given: torch.Tensor = x) -> torch.Tensor:
            return there.matvec(given)

        pair = {"offloaded": seconds_of(fetched, 3), "resident": seconds_of(stays, 3)}
        found[columns] = pair | {"ratio": pair["offloaded"] / pair["resident"]}
    return {"size": size, "device": str(device), "columns": found}


@dataclass(frozen=True)
class Figure:
    """One figure that is said, and how it is found again."""

    said: str
    value: float
    within: float
    """Half of the last digit that is said."""
    found: Callable[[int], float]
    """The figure of a matrix of N rows."""
    form: str
    remark: str

    def verdict(self) -> str:
        """Return where it is reproduced, with what is found elsewhere."""
        numbers = {size: self.found(size) for size in SIZES}
        hits = [size for size, number in numbers.items() if abs(number - self.value) <= self.within]
        least, most = (self.form.format(numbers[size]) for size in (SIZES[0], SIZES[-1]))
        where = f"reproduced at N = {', '.join(f'{size:,}' for size in hits)}" if hits else "not reproduced"
        return f"{where}: {least} at N = {SIZES[0]:,} to {most} at {SIZES[-1]:,}. {self.remark}"


def _saved(size: int, lowrank: torch.dtype = torch.float32, levels: int = 1, key: str = "vs_dense") -> float:
    return 100 * float(formula_bytes(size, level_ranks(size, levels), lowrank)[f"memory_reduction_{key}"])


def _levels_over_one(size: int) -> float:
    one, three = (formula_bytes(size, level_ranks(size, k), torch.float32)["total_bytes"] for k in (1, 3))
    return float(three / one)


def _one_over_mixed(size: int) -> float:
    single, mixed = (
        formula_bytes(size, level_ranks(size, 1), each)["total_bytes"] for each in (torch.float32, torch.float16)
    )
    return float(single / mixed)


def _resident(size: int) -> float:
    report = formula_bytes(size, level_ranks(size, 1), torch.float32)
    return float(report["total_bytes"] / report["tridiagonal_bytes"])


def _fit_over_one(size: int) -> float:
    return sum(level_ranks(size, 3)) / default_rank(size)


FIGURES = (
    Figure("98.8 % less than dense, one level", 98.8, 0.05, _saved, "{:.2f} %",
           "Of storage in float32; the error that comes with it is the data's to say"),
    Figure("99.3 % less with mixed precision", 99.3, 0.05, lambda n: _saved(n, torch.float16), "{:.2f} %",
           "U and V in float16, T in float32"),
    Figure("44 % less than float32 by mixed precision", 44, 0.5, lambda n: _saved(n, torch.float16, key="vs_fp32"),
           "{:.1f} %", "T stays in float32, so half is never reached"),
    Figure("98.2 % less with three levels", 98.2, 0.05, lambda n: _saved(n, levels=3), "{:.2f} %",
           "Levels are columns of one U and V: *more* bytes than one level at the same N"),
    Figure("2.5x by mixed precision", 2.5, 0.05, _one_over_mixed, "{:.2f}x", "Below 2 always"),
    Figure("memory in O(N log log N) by levels", 1, 0.005, _levels_over_one, "{:.2f} times the bytes of one level",
           "The first level alone has ⌈log₂ N⌉ columns; block SSS of order ⌈log₂ log₂ N⌉ is O(N log log N)"),
    Figure("a product in O(N)", 5, 0.5, lambda n: 5.0 + 4 * default_rank(n), "{:.0f} operations a row and column",
           "5 + 4⌈log₂ N⌉ of them: O(N log N)"),
    Figure("a factorisation in O(N² log log N) by levels", 1, 0.005, _fit_over_one,
           "{:.2f} times the products of one level",
           "A sweep takes 4 products of N² for each column of all levels, of which the first has ⌈log₂ N⌉"),
    Figure("3x on 2 GPUs", 3, 0.5, lambda n: float(scaling(n, default_rank(n), 2)["scaling_factor"]),
           "{:.2f}x by columns", "By rows it is 2, and never more"),
    Figure("8x larger by offload", 8, 0.5, _resident, "{:.1f}x",
           "It counts what stays on the device: all of U and V come back for every product"),
)  # fmt: skip


def table() -> Iterator[str]:
    """Yield the lines of the table of circulating figures."""
    yield "| what is said of T + U Vᵀ with r = ⌈log₂ N⌉ | what is found for N = 512 … 131,072 |"
    yield "|---|---|"
    for figure in FIGURES:
        yield f'| "{figure.said}" | {figure.verdict()} |'


def claims(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the claims about what was measured."""
    product, construction, memory_of = found["speed"]["product"], found["speed"]["construction"], found["memory"]
    rows, mixed = memory_of["rows_over_ranks"], memory_of["float32_over_mixed"].values()
    claim = results_file.claim
    return [
        claim(
            "an SSS product of 64 columns, over T + U Vᵀ of equally many numbers", product["sss_over_tridiagonal"], 5
        ),
        claim("a dense product, over SSS", product["dense_over_sss"], 40, at_most=False),
        claim("a dense product, over T + U Vᵀ", product["dense_over_tridiagonal"], 40, at_most=False),
        claim("SSS construction at 4096, over one dense product of N³", construction["ratio"], 1),
        claim(
            "GiB of a construction of 32768 rows by callback",
            memory_of["callback"]["bytes_beyond_the_process"] / 2**30,
            1,
        ),
        claim(
            "the largest share of rows over 4 ranks, over ⌈N/4⌉/N of the whole and one halo",
            rows["bytes"] / (rows["rows_share"] * rows["whole_bytes"] + 2 * 4),
            1,
        ),
        claim("bytes in float32, over those in mixed precision, at least", min(mixed), 1.75, at_most=False),
        claim("bytes in float32, over those in mixed precision, at most", max(mixed), 1.86),
    ]


def main() -> int:
    """Measure, store and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the table of docs/circulating-figures.md")
    parser.add_argument("--counted", action="store_true", help="the table alone: nothing is measured")
    options = parser.parse_args()
    if options.docs:
        write_table(PAGE, NAME, table())
        print("\n".join(table()))
    if options.counted:
        return 0
    torch.set_num_threads(1)
    found: dict[str, Any] = {"speed": speed(), "memory": memory(), "offload": offload()}
    results_file.write(NAME, claims(found), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
