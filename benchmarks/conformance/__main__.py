"""Run libraries through the conformance table: ``python -m benchmarks.conformance [LIBRARY …]``.

Every library answers every case in a process of its own, the peers in their own environment
(``environment.sh``). Another library joins by one file in ``adapters/``.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.conformance import cases

ROOT = Path(__file__).parent.parent.parent
PEERS_PYTHON = Path(os.environ.get("KRONOSCOPE_PEERS", ROOT / ".peers")) / "bin" / "python"
OURS = "kronoscope"
PEERS = ("kronfluence", "curvlinops", "bergson")


def rows(library: str) -> dict[str, Any]:
    """Every case's row of one library."""
    python = sys.executable if library == OURS else str(PEERS_PYTHON)
    finished = subprocess.run(  # noqa: S603 - our own module
        [python, "-m", "benchmarks.conformance.answers", library],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    answers = [
        json.loads(line.removeprefix("row ")) for line in finished.stdout.splitlines() if line.startswith("row ")
    ]
    if len(answers) != len(cases.CASES):
        raise RuntimeError(f"{library} answered {len(answers)} of {len(cases.CASES)} cases:\n{finished.stderr[-2000:]}")
    return {answer.pop("case"): answer for answer in answers}


def shown(row: dict[str, Any]) -> str:
    """One cell of the table."""
    if "covered" in row:
        return f"{row['covered']:.0%} covered, {row['declared']:.0%} declared"
    if row["verdict"] == "exact":
        return "exact" if abs(row["scale"] - 1) < 1e-6 else f"exact (× {row['scale']:.3g})"
    if row["verdict"] == "refused":
        named = " (names it)" if row.get("names_it") else ""
        return f"refused{named}"
    return f"WRONG by {row['error']:.2g}" if "error" in row else row.get("message", row["verdict"])


def right(row: dict[str, Any]) -> bool:
    """Whether the row is what the oracle asks: the right numbers, or, for a NaN, an error that names its place."""
    if row["verdict"] == "refused":
        return bool(row.get("names_it"))
    return bool(row["verdict"] == "exact" and abs(row.get("scale", 1.0) - 1) < 1e-6)


def main() -> None:
    """Ask every library, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", default=[OURS, *(PEERS if PEERS_PYTHON.exists() else ())])
    libraries = parser.parse_args().libraries
    table = {library: rows(library) for library in libraries}
    print("".join(f"{title:34}" for title in ("case", *libraries)))
    for name in cases.CASES:
        print(f"{name:34}" + "".join(f"{shown(table[library][name])[:32]:34}" for library in libraries))
    claims = []
    if OURS in table:
        share = sum(right(row) for row in table[OURS].values()) / len(cases.CASES)
        claims.append(
            results_file.claim("share of the cases that Kronoscope answers exactly", share, 1.0, at_most=False)
        )
    results_file.write("conformance", claims, {"table": table})


if __name__ == "__main__":
    main()
