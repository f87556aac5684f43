"""The architecture table: what is covered of each model, and how far its numbers are from plain autograd.

``python -m benchmarks.architectures [NAME …]`` builds models of transformers, timm, diffusers, PEFT and
torch_geometric from tiny configurations with random weights, and networks by hand, collects their
curvature, and holds every covered layer against the oracle (``architecture_oracle``). Run without names
it writes ``results/architectures.json`` and, from it, ``docs/architectures.md``; ``--page`` writes the
page alone. Packages that are missing are said to be (``make architectures`` installs them).
``--checkpoints`` measures the checkpoints alone, which a service reads (``results/architecture_checkpoints.json``).
"""

import argparse
import json
import logging
import re
import signal
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import results_file
from benchmarks.architecture_cases import (
    adapters,
    checkpoints,
    compositions,
    diffusion,
    graphs,
    language,
    networks,
    traps,
    vision,
)
from benchmarks.architecture_cases.judgement import TOLERANCE, judged

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
RESULTS = ("architectures", "architecture_checkpoints")
"""The stored results that the page is made of."""
SECONDS = 120
"""A case that takes longer is given up, and says so."""
SECTIONS = {
    "Language models (transformers)": language.CASES,
    "Images, sound and arrays (timm, transformers)": vision.CASES,
    "Denoisers (diffusers)": diffusion.CASES,
    "Adapters (PEFT)": adapters.CASES,
    "Graphs (torch_geometric)": graphs.CASES,
    "Networks by hand": networks.CASES,
    "Networks by hand of less usual operations": compositions.CASES,
    "Networks by hand that mislead recognition": traps.CASES,
}
_PAGE = """\
# Architectures

What Kronoscope covers of each model, and how far the numbers of the covered layers are from plain autograd. This page
is written by `python -m benchmarks.architectures`; `make architectures` installs what that needs and runs it.

Measured at {when} on commit `{commit}` ({device}), with torch {torch}, transformers {transformers}, {packages}.

The oracle has no code of Kronoscope's: each example alone, float64, the gradient at its own labels
(`fisher: empirical`). *Worst error* is the largest relative error of any exact trace, block, A or G of a covered
layer; A and G are compared where plain module hooks see their rows. A number is right up to {tolerance}. Models are
built from tiny configurations, and every weight has noise added, so that no gradient is zero by initialisation. Casts
to float32 in the packages' sources keep float64. timm is imported beside a stand-in for torchvision, of which it needs
names only.

{cases} cases: {counts}. Of the {measured} that were collected, {complete} are covered completely.

*right*: every number that the oracle knows is; *refused*: the job ends with the error in the last column; *random*:
the model draws numbers, so there is nothing to compare; *wrong*: a number is off, or a parameter is neither covered nor
declared; *false reason*: `no_gradient` or `never_routed` is said where the oracle finds a gradient.
"""
_CHECKPOINTS = """\

## Checkpoints of transformers, through the service

Tiny checkpoints that the loaders of a job read, by a document with `source: directory` and `source: file`: {cases}
model types, measured at {when} on commit `{commit}` ({device}). {right} are right with 99 % of the parameters covered
or more; of each other the last column says why. The oracle reads the same folder with `from_pretrained`. *Worst error*
is as above, the exact trace among its numbers; for `embedding` the gradients are those of every embedded number.
Seconds are of reading, measuring and comparing.

| model type | task | result | covered | worst error | seconds | not covered, and why |
|---|---|---|---|---|---|---|
"""
COMPLETE = 0.99
"""Share of the parameters from which on a checkpoint counts as covered."""
_WORST = ("wrong", "crashed", "false reason", "too slow", "no case")
_SHOWN = 4
"""Wrong numbers and false reasons that a row keeps; the rest is counted."""


class TooSlow(Exception):
    """A case took longer than it may."""


def rows(names: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Section, name and row of every case, or of those named."""
    signal.signal(signal.SIGALRM, _give_up)
    for section, cases in SECTIONS.items():
        for name, build in cases.items():
            if names and name not in names:
                continue
            signal.alarm(SECONDS)
            try:
                row = judged(build)
            except TooSlow:
                row = {"verdict": "too slow", "message": f"more than {SECONDS} s"}
            finally:
                signal.alarm(0)
            yield section, name, row


def _give_up(_: int, __: FrameType | None) -> None:
    raise TooSlow


def shown(name: str, row: dict[str, Any]) -> Iterator[str]:
    """A row for the terminal, and below it what is wrong."""
    worst = row.get("worst") or {"error": 0.0, "quantity": "", "layer": ""}
    covered = f"{row['covered']:7.1%}" if "covered" in row else "      -"
    yield f"{name:36} {row['verdict']:13} {covered} {worst['error']:8.1e}  {reasons(row)}"
    for found in (*row.get("wrong", ())[:_SHOWN], *row.get("false_reasons", ())[:_SHOWN]):
        yield f"{'':36}   {found}"


def reasons(row: dict[str, Any]) -> str:
    """Why something is not covered, or nothing was measured."""
    if "message" in row:
        said = str(row["message"]).replace("\n", " ")
        while (shorter := re.sub(r" \([^()]*\)", "", said)) != said:
            said = shorter
        return said.split(";")[0]
    return ", ".join(f"{reason} {share:.1%}" for reason, share in row.get("reasons", {}).items())


def judged_checkpoints(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return and print the row of every checkpoint, or of those named."""
    signal.signal(signal.SIGALRM, _give_up)
    table = {}
    for name, case in checkpoints.CASES.items():
        if names and name not in names:
            continue
        signal.alarm(SECONDS)
        try:
            row = checkpoints.judged(name, case)
        except TooSlow:
            row = {"verdict": "too slow", "message": f"more than {SECONDS} s", "seconds": SECONDS}
        finally:
            signal.alarm(0)
        print(*shown(name, row), sep="\n", flush=True)
        table[name] = row | {key: row[key][:_SHOWN] for key in ("wrong", "false_reasons") if key in row}
    return table


def is_right(row: dict[str, Any]) -> bool:
    """Return whether a checkpoint is right and covered."""
    return bool(row["verdict"] == "right" and row["covered"] >= COMPLETE)


def checkpoint_lines(result: dict[str, Any]) -> str:
    """Return the checkpoints' part of the page."""
    table = result["figures"]["table"]
    text = _CHECKPOINTS.format(
        cases=len(table), when=result["measured_at"], commit=result["commit"][:12], device=result["device"],
        right=sum(map(is_right, table.values())),
    )  # fmt: skip
    for name, row in table.items():
        covered = f"{row['covered']:.1%}" if "covered" in row else ""
        worst = f"{row['worst']['error']:.0e}" if row.get("worst") else ""
        cells = (name, row.get("task", ""), row["verdict"], covered, worst, str(row.get("seconds", "")), reasons(row))
        text += f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |\n"
    return text


def page(result: dict[str, Any], read: dict[str, Any]) -> str:
    """Return the tables as a page of the documentation: of models, and of checkpoints that a service reads."""
    table = result["figures"]["table"]
    every = [row for cases in table.values() for row in cases.values()]
    measured = [row for row in every if "covered" in row]
    packages = ", ".join(f"{name} {number}" for name, number in result["figures"]["packages"].items())
    text = _PAGE.format(
        when=result["measured_at"], commit=result["commit"][:12], device=result["device"],
        torch=result["versions"]["torch"], transformers=result["versions"]["transformers"], packages=packages,
        tolerance=f"{TOLERANCE:.0e}", cases=len(every), counts=_counts(every), measured=len(measured),
        complete=sum(row["covered"] > 1 - 1e-9 for row in measured),
    )  # fmt: skip
    lines = text.splitlines()
    for section, cases in table.items():
        lines += ["", f"## {section}", "", "| architecture | result | covered | worst error | not covered, and why |"]
        lines += ["|---|---|---|---|---|"]
        for name, row in cases.items():
            covered = f"{row['covered']:.1%}" if "covered" in row else ""
            worst = f"{row['worst']['error']:.0e}" if row.get("worst") else ""
            lines.append(f"| {name} | {row['verdict']} | {covered} | {worst} | {reasons(row).replace('|', '¦')} |")
    return "\n".join(lines) + "\n" + checkpoint_lines(read)


def _counts(every: list[dict[str, Any]]) -> str:
    verdicts = Counter(row["verdict"] for row in every)
    return ", ".join(f"{number} {each}" for each, number in sorted(verdicts.items(), key=lambda own: (-own[1], own[0])))


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Judge the cases, print the table, write the result and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--page", action="store_true", help="write docs/architectures.md from the stored result")
    parser.add_argument("--checkpoints", action="store_true", help="measure the checkpoints alone, and write the page")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.checkpoints or not (options.page or options.names):
        measured = judged_checkpoints(options.names)
        if options.names:
            return
        results_file.write("architecture_checkpoints", _checkpoint_claims(measured), {"table": measured})
    if not (options.page or options.checkpoints):
        table: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for section, name, row in rows(options.names):
            print(*shown(name, row), sep="\n", flush=True)
            table[section][name] = row | {key: row[key][:_SHOWN] for key in ("wrong", "false_reasons") if key in row}
        if options.names:
            return
        packages = {name: _installed(name) for name in ("timm", "diffusers", "peft", "torch_geometric")}
        results_file.write("architectures", _claims(table), {"packages": packages, "table": table})
    PAGE.write_text(page(*(json.loads((results_file.RESULTS / f"{name}.json").read_text()) for name in RESULTS)))


def _checkpoint_claims(table: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    errors = [row["worst"]["error"] for row in table.values() if row.get("worst")]
    claim = results_file.claim
    return [
        claim("model types read as a service reads them", len(table), 80, at_most=False),
        claim("right, with 99 % of the parameters covered", sum(map(is_right, table.values())), 70, at_most=False),
        claim("largest relative error of a covered layer's numbers", max(errors, default=0.0), TOLERANCE),
        *(
            claim(f"cases: {verdict}", sum(row["verdict"] == verdict for row in table.values()), 0)
            for verdict in _WORST
        ),
    ]


def _claims(table: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    every = [row for cases in table.values() for row in cases.values()]
    errors = [row["worst"]["error"] for row in every if row.get("worst")]
    claim = results_file.claim
    return [
        claim("architectures held against plain autograd", len(errors), 60, at_most=False),
        claim("largest relative error of a covered layer's numbers", max(errors, default=0.0), TOLERANCE),
        *(claim(f"cases: {verdict}", sum(row["verdict"] == verdict for row in every), 0) for verdict in _WORST),
    ]


if __name__ == "__main__":
    main()
