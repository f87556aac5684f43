"""What every benchmark leaves: ``results/<name>.json`` with claims, raw figures and the machine.

A claim that does not hold is written down as such; the script still ends normally, since a
benchmark reports and a test judges.
"""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def claim(text: str, value: float, target: float, *, at_most: bool = True) -> dict[str, Any]:
    """One claim: ``value`` must be at most (or at least) ``target``."""
    return {"claim": text, "value": value, "target": target, "holds": value <= target if at_most else value >= target}


def not_measured(text: str, target: float, reason: str) -> dict[str, Any]:
    """A claim that this run could not measure."""
    return {"claim": text, "value": None, "target": target, "holds": None, "reason": reason}


def header(name: str) -> dict[str, Any]:
    """Return when, of which commit, on what and with which versions something is measured."""
    return {
        "name": name,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": _device(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in ("kronoscope", "torch", "transformers", "scipy")},
        },
    }


def write(name: str, claims: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    """Store the result and print its claims."""
    store(name, claims, figures)
    show(claims)


def store(name: str, claims: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    """Store the result; a run that is stopped meanwhile leaves the one before."""
    RESULTS.mkdir(exist_ok=True)
    content = header(name) | {"claims": claims, "figures": figures}
    beside = RESULTS / f".{name}.json.part"
    beside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    beside.replace(RESULTS / f"{name}.json")


def show(claims: list[dict[str, Any]]) -> None:
    """Print claims."""
    for found in claims:
        if found["holds"] is None:
            print(f"NOT MEASURED: {found['claim']}: {found['reason']}", flush=True)
            continue
        word = "holds" if found["holds"] else "DOES NOT HOLD"
        print(f"{word}: {found['claim']}: {found['value']:.3g} (target {found['target']:.3g})", flush=True)


def read(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return claims and figures of a stored result; nothing where it is of another commit or another machine."""
    try:
        stored = json.loads((RESULTS / f"{name}.json").read_text())
    except FileNotFoundError:
        return [], {}
    now = header(name)
    if any(stored[fact] != now[fact] for fact in ("commit", "device", "versions")):
        return [], {}
    return stored["claims"], stored["figures"]


def _version(package: str) -> str:
    """Return a package's version; a tree that runs where it stands is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, {platform.machine()}"


def commit() -> str:
    """Return the commit that is measured, marked where Python files differ from it.

    A copy of the tree without its history names it in ``KRONOSCOPE_COMMIT``.
    """
    if "KRONOSCOPE_COMMIT" in os.environ:
        return os.environ["KRONOSCOPE_COMMIT"]

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=RESULTS.parent)  # noqa: S603, S607 - fixed words
        return found.stdout.strip()

    return (git("rev-parse", "HEAD") or "unknown") + ("+changes" if git("status", "--porcelain", "--", "*.py") else "")
