"""The stored run that trackers are given, and its metrics as its own files have them."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "tests" / "kronoscope" / "stored_run"


def exported(to: str, folder: Path, run: Path = RUN, code: int = 0, limit: str = "unlimited") -> str:
    """Export the run as its user does, with files of at most so many KiB; returns what is said of faults."""
    command = [sys.executable, "-P", "-m", "kronoscope.cli.main", "export", str(run), "--to", to, "-o", str(folder)]
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(folder.parent), "PATH": "/usr/bin:/bin"}
    limited = ["/bin/sh", "-c", f"trap '' XFSZ; ulimit -f {limit}; exec \"$@\"", "sh", *command]
    done = subprocess.run(limited, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return " ".join(done.stderr.split())


def metrics() -> dict[tuple[str, int], float]:
    """Each plain number that an analysis measured, by name and place of the layer."""
    rows = json.loads((RUN / "results.json").read_text())["layers"]
    return {
        (f"{row['kind']}/{name}", row["ordinal"]): value
        for row in rows
        for name, value in (row["metrics"] or {}).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
