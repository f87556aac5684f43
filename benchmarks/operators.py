"""Operators against gradients, matrix products and a peer: seconds, peak memory, and growth with the size.

K-FAC and the exact GGN of a GPT-2 (4 layers, 256 wide, 8192 words, with its head) and of MiniLM, on one thread, against
curvlinops, which stands in the same process over the very same factors; medians over rounds of the ratios of CPU
seconds within a round. Peaks are those of processes of their own. The peer lives in an environment of its own
(``make peers``); without it its claims are not measured.

    python -m benchmarks.operators [--cases gpt2 minilm] [--rounds 5] [--output NAME]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import results_file
from benchmarks.cases import operator_figures
from benchmarks.cases import operators as cases
from benchmarks.conformance.__main__ import PEERS_PYTHON, ROOT
from catalog.requests.collection import Stabilisation
from engine.factors.dense import as_operator
from engine.factors.factor_files import Kept, write_factors, write_index
from engine.factors.kronecker_factors import digest
from engine.factors.low_rank import LowRank
from engine.linalg.damping import damping
from engine.linalg.eigenbasis import Eigenbasis
from engine.linalg.linear_operator import Structured
from engine.operators.kronecker.factor_side import FactorSide
from engine.operators.kronecker.layer_operator import LayerOperator
from kronoscope.local import operator
from worker.execution.files.artifact_files import ArtifactFiles

OUTPUTS = 50257
POSITIONS, WIDTHS = (1024, 1536, 2048), (128, 256)
UNMEASURED = (
    f"no peer (make peers), or eigenvectors of more than {operator_figures.MOST_ROWS} rows, which it takes minutes for"
)
SUBJECTS = ("product", "factored", "exact", "ggn")
_KFAC = {"product": "K-FAC product", "factored": "K-FAC solve (factored)", "exact": "K-FAC solve (exact)"}


def child(*arguments: str, peers: bool) -> dict[str, Any]:
    """Figures that one process of ``operator_figures`` measures."""
    finished = subprocess.run(  # noqa: S603 - our own module
        [str(PEERS_PYTHON) if PEERS_PYTHON.exists() else sys.executable, "-m", operator_figures.__name__, *arguments]
        + (["--peers"] if peers else []),
        capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    found = next(operator_figures.lines(finished.stdout), None)
    return {"refused": finished.stderr[-500:]} if found is None else found


def measured(case: str, rounds: int) -> dict[str, Any]:
    """All figures of one case."""
    peers = PEERS_PYTHON.exists()
    found: dict[str, Any] = {"seconds": child("seconds", case, "--rounds", str(rounds), peers=peers)}
    found["peak"] = {subject: child("peak", case, "--subject", subject, peers=False) for subject in SUBJECTS}
    if peers:
        named = [
            subject for subject in SUBJECTS if subject != "exact" or "peer's exact" in found["seconds"].get("kfac", ())
        ]
        found["peer's peak"] = {subject: child("peak", case, "--subject", subject, peers=True) for subject in named}
    return found


def rows_grow() -> dict[str, Any]:
    """CPU seconds of a solve with G as gradient rows, by positions T and width h, at 50257 outputs."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for positions in POSITIONS:
        rows = torch.randn(positions, OUTPUTS, generator=generator)
        side = LowRank(rows=rows, scales=torch.ones(positions, dtype=torch.float64), weight=float(positions))
        values, vectors = side.eigenbasis("head")
        basis = Eigenbasis(values, vectors.float())
        del vectors
        for width in WIDTHS:
            draws = torch.randn(2 * width, width, generator=generator)
            A = draws.T @ draws / (2 * width)
            G = FactorSide(side, lambda _, basis=basis: basis)  # type: ignore[misc] # a default binds it
            lam = damping(float(A.trace()) / width, side.trace() / OUTPUTS, Stabilisation(), block=False)
            a = FactorSide(as_operator(A), lambda _, A=A: _eigenbasis(A))  # type: ignore[misc] # as above
            own = LayerOperator(name="head", G=G, A=a, kind="factored", damping=lam)
            right = torch.randn(OUTPUTS, 1, width, generator=generator)
            own.apply(right, -1.0)
            seconds = []
            for _ in range(5):
                begun = time.process_time()
                own.apply(right, -1.0)
                seconds.append(time.process_time() - begun)
            found.append({"T": positions, "h": width, "seconds": statistics.median(seconds)})
    # least squares of the relative deviations
    rates = [each["seconds"] / (OUTPUTS * each["T"] * each["h"]) for each in found]
    fitted = sum(1 / rate for rate in rates) / sum(1 / rate**2 for rate in rates)
    return {"runs": found, "seconds_per_number": fitted, "deviation": max(abs(rate / fitted - 1) for rate in rates)}


def _eigenbasis(A: torch.Tensor) -> Eigenbasis:
    values, vectors = torch.linalg.eigh(A.double())
    return Eigenbasis(values, vectors.float())


def from_disk(case: str) -> dict[str, Any]:
    """Seconds of K-FAC products from a folder, with all factors resident and with a quarter of them."""
    made = cases.built(case)
    factors = cases.factors_of(made)
    with tempfile.TemporaryDirectory() as folder:
        files, kept, total = ArtifactFiles(Path(folder), lambda *_: None), {}, 0
        for facts in factors.layers:
            own = factors.load(facts.ordinal)
            write_factors(files, facts, own)
            structured = own.G if isinstance(own.G, Structured) else None
            kept[facts.ordinal] = Kept(
                digest_A=digest(own.A), digest_G=digest(own.G), scale_A=own.scale_A, scale_G=own.scale_G,
                metadata_G={} if structured is None else structured.metadata(), ekfac={},
            )  # fmt: skip
            total += own.G.size_bytes if structured is not None else 4 * facts.out_dim**2
            total += 4 * facts.in_dim**2 if facts.shared_A_with is None else 0
        write_index(files, factors, kept)
        del factors
        resident = operator(folder)
        quarter = operator(folder, resident_bytes=total // 4)
        vector = torch.randn(made.size)
        difference = float((resident @ vector - quarter @ vector).abs().max())
        seconds = operator_figures.timed(
            {"resident": lambda: resident @ vector, "quarter": lambda: quarter @ vector}, 3
        )
    return {
        "bytes": total, "seconds": seconds, "difference": difference,
        "ratio": operator_figures.ratio(seconds, "quarter", "resident"),
    }  # fmt: skip


def claims(figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every target of the benchmark, met or not."""
    for name, case in figures.items():
        found = case["seconds"]
        if "refused" in found:
            yield results_file.not_measured(f"{name}: seconds", 1.0, found["refused"])
            continue
        kfac, ggn = found["kfac"], found["ggn"]
        for subject, said in _KFAC.items():
            gemms = "gemms of exact" if subject == "exact" else "gemms"
            value = operator_figures.ratio(kfac, subject, gemms)
            yield results_file.claim(f"{name}: seconds of a {said} over its matrix products", value, 1.2)
            yield from _over_peer(f"{name}: seconds of a {said} over curvlinops'", kfac, subject, f"peer's {subject}")
        ten = found["kfac_columns"]
        value = operator_figures.ratio(ten, "all", "one") / operator_figures.COLUMNS
        yield results_file.claim(f"{name}: seconds of 10 K-FAC products at once over 10 single ones", value, 1.15)
        value = operator_figures.ratio(ggn, "ggn", "gradient")
        yield results_file.claim(f"{name}: seconds of a GGN product over a gradient's", value, 2.0)
        yield from _over_peer(f"{name}: seconds of a GGN product over curvlinops'", ggn, "ggn", "peer's ggn")
        value = operator_figures.ratio(found["ggn_columns"], "all", "one") / operator_figures.COLUMNS
        yield results_file.claim(f"{name}: seconds of 10 GGN products at once over 10 single ones", value, 0.8)
        if found["wide_tensors"] is not None:
            text = f"{name}: tensors of B·T·V numbers alive at once in a GGN product"
            yield results_file.claim(text, found["wide_tensors"], 2)
        for what, bound in (("kfac", 1e-5), ("ggn", 1e-5)):
            if f"difference_{what}" in found:
                text = f"{name}: relative difference of the {what.upper()} product from curvlinops'"
                yield results_file.claim(text, found[f"difference_{what}"], bound)
        for subject in SUBJECTS:
            yield _peak(name, subject, case)


def _over_peer(text: str, seconds: dict[str, Any], left: str, right: str) -> Iterator[dict[str, Any]]:
    if right in seconds:
        yield results_file.claim(text, operator_figures.ratio(seconds, left, right), 0.8)
    else:
        yield results_file.not_measured(text, 0.8, UNMEASURED)


def _peak(name: str, subject: str, case: dict[str, Any]) -> dict[str, Any]:
    text = f"{name}: peak of a {_KFAC.get(subject, 'GGN product')} over curvlinops'"
    ours, peer = case["peak"][subject], case.get("peer's peak", {}).get(subject)
    if peer is None or "refused" in ours or "refused" in peer:
        return results_file.not_measured(text, 0.8, UNMEASURED if peer is None else json.dumps([ours, peer]))
    return results_file.claim(text, ours["first"] / peer["first"], 0.8)


def main() -> None:
    """Measure the cases one after the other and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=cases.CASES, default=list(cases.CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="operators", help="name of the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, disk = rows_grow(), from_disk(arguments.cases[0])
    figures = {case: measured(case, arguments.rounds) for case in arguments.cases}
    found = list(claims(figures))
    text = f"seconds of a solve with gradient rows at o = {OUTPUTS}: largest deviation from a multiple of o·T·h"
    found.append(results_file.claim(text, rows["deviation"], 0.15))
    text = "K-FAC product from disk with a quarter of the factors resident, over the resident one"
    found.append(results_file.claim(text, disk["ratio"], 3.0))
    results_file.write(
        arguments.output,
        found,
        {
            "method": __doc__,
            "clock": "CPU seconds of one thread",
            "rounds": arguments.rounds,
            "gemms": "torch's products of contiguous float32 matrices of the layers' shapes, the bias as a column; "
            "of a G that is kept as rows, those with the rows",
            "peer": "curvlinops-for-pytorch 3.0.1, over our factors (a head that is kept as rows made dense for it), "
            "flat vectors, weight and bias together; its GGN by eager attention, since it refuses `sdpa`",
            "cases": figures,
            "gradient_rows": rows,
            "disk": disk,
        },
    )


if __name__ == "__main__":
    main()
