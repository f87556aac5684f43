"""Mutate formulas of the engine, one at a time, and see whether a landing's tests of their room fail.

    python -m ops.mutate_formulas [--count 10] [--seed N] [--part COMMIT] [--json FILE] [--list]

A mutation changes one arithmetic operation: a factor or a divisor is dropped, a sum becomes a difference, the factors
of a matrix product change places, a transposition is left out. Modules and operations are drawn by the seed, not chosen
by what the tests find. Each is tried in a copy of the commit, with the part of its grids that a landing has; one that
passes there is tried with every case. An operation of EQUIVALENT is passed over for its module's next.
"""

import argparse
import ast
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEED = 20_261_127
ROOM_SECONDS = 1_800
TRANSPOSITIONS = ("T", "mT", "H", "mH")
EQUIVALENT = {
    "engine/linalg/kronecker_spectrum.py:358: a.weights @ inner -> inner @ a.weights": "a product commutes",
}
"""Mutations that change no number, as `module:line: before -> after`, each with the reason."""


@dataclass(frozen=True)
class Mutation:
    """One operation of a module, and what stands in its place."""

    module: str
    line: int
    before: str
    after: str
    begin: int
    """Offset of its first character in the module."""
    end: int

    @property
    def name(self) -> str:
        """Where it is and what it does."""
        return f"{self.module}:{self.line}: {self.before} -> {self.after}"

    @property
    def tests(self) -> str:
        """The folder of its room's tests."""
        return f"tests/{Path(self.module).parts[0]}/{Path(self.module).parts[1]}"

    def applied(self, source: str) -> str:
        """Return a module's source with the mutation in it."""
        return f"{source[: self.begin]}({self.after}){source[self.end :]}"


def mutant(node: ast.AST) -> ast.expr | None:
    """Return what takes the place of an operation, or nothing where it is none of these."""
    if isinstance(node, ast.Attribute) and node.attr in TRANSPOSITIONS and isinstance(node.ctx, ast.Load):
        return node.value
    if not isinstance(node, ast.BinOp) or _is_text(node):
        return None
    swaps: dict[type[ast.operator], ast.operator] = {ast.Add: ast.Sub(), ast.Sub: ast.Add()}
    if type(node.op) in swaps:
        return ast.BinOp(node.left, swaps[type(node.op)], node.right)
    if isinstance(node.op, ast.MatMult):
        return ast.BinOp(node.right, node.op, node.left)
    if isinstance(node.op, ast.Pow):
        return ast.BinOp(node.left, node.op, ast.BinOp(node.right, ast.Add(), ast.Constant(1)))
    return node.left if isinstance(node.op, ast.Mult | ast.Div) else None


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operation joins or repeats texts or sequences, as far as its operands show."""
    parts = [each for side in (node.left, node.right) for each in ast.walk(side)]
    sequences = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, ast.Dict, ast.Set)
    return any(isinstance(side, sequences) for side in (node.left, node.right)) or any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in parts
    )


def mutations_of(module: str, source: str) -> list[Mutation]:
    """Return a module's mutations, in the order of its text."""
    begins = [0, *(match.end() for match in re.finditer("\n", source))]

    def offset(line: int, column: int) -> int:
        first = begins[line - 1]
        text = source[first : source.find("\n", first)].encode()
        return first + len(text[:column].decode())

    found = []
    for node in ast.walk(ast.parse(source)):
        other = mutant(node)
        if other is None or not isinstance(node, ast.expr):
            continue
        begin = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        found.append(Mutation(module, node.lineno, ast.unparse(node), ast.unparse(other), begin, end))
    return sorted(found, key=lambda each: (each.begin, each.end))


def draw(checkout: Path, seed: int, count: int) -> Iterator[Mutation]:
    """Yield mutations of different modules of the engine, drawn by a seed among the rooms that have tests."""
    paths = sorted(
        path.relative_to(checkout).as_posix()
        for path in (checkout / "engine").rglob("*.py")
        if len(path.relative_to(checkout).parts) > 2
        and (checkout / "tests" / path.relative_to(checkout).parent).exists()
    )
    chance = random.Random(seed)  # noqa: S311 - a draw that can be repeated
    chance.shuffle(paths)
    drawn = 0
    for module in paths:
        if drawn == count:
            return
        own = mutations_of(module, (checkout / module).read_text())
        chance.shuffle(own)
        chosen = next((each for each in own if each.name not in EQUIVALENT), None)
        if chosen is not None:
            drawn += 1
            yield chosen


@dataclass(frozen=True)
class Verdict:
    """Whether tests noticed a mutation."""

    mutation: str
    tests: str
    landing: bool
    """Whether a landing's part noticed it."""
    every_case: bool
    failed: str
    """The first test that failed."""
    seconds: float


def judge(mutation: Mutation, folder: Path, part: str) -> Verdict:
    """Try a mutation in a copy of the project, and mend the copy; the files nearest to its module are tried first."""
    path = folder / mutation.module
    source = path.read_text()
    path.write_text(mutation.applied(source))
    began = time.monotonic()
    try:
        places = (nearest_tests(mutation, folder), [mutation.tests])
        landing = next((failed for each in places if each and (failed := first_failure(folder, each, part))), "")
        failed = landing or first_failure(folder, [mutation.tests], "all")
    finally:
        path.write_text(source)
    seconds = round(time.monotonic() - began, 1)
    return Verdict(mutation.name, mutation.tests, bool(landing), bool(failed), failed, seconds)


def nearest_tests(mutation: Mutation, folder: Path) -> list[str]:
    """Return the test files of a module's room that are named after it or import it."""
    stem, name = Path(mutation.module).stem, mutation.module.removesuffix(".py").replace("/", ".")
    return [
        path.relative_to(folder).as_posix()
        for path in sorted((folder / mutation.tests).rglob("test_*.py"))
        if path.stem == f"test_{stem}" or f"from {name} import" in path.read_text()
    ]


def first_failure(folder: Path, tests: Sequence[str], part: str) -> str:
    """Return the first test that fails, or nothing where all pass."""
    options = ["-x", "-q", "-m", "not gpu and not docker and not slurm", "-p", "no:cacheprovider", f"--part={part}"]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(  # noqa: S603 - ours
            [sys.executable, "-m", "pytest", *options, f"--basetemp={place}/tests", *tests],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=ROOM_SECONDS,
            check=False,
        )
    if done.returncode == 0:
        return ""
    lines = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return lines[0] if lines else f"exit {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"


def read_git(*arguments: str) -> bytes:
    """Return what git says of this project."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout  # noqa: S603, S607


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; it fails where a landing passes a mutation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--part", help="the commit that parts are chosen by (default: HEAD)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    parser.add_argument("--list", action="store_true", help="print the mutations, and try none")
    given = parser.parse_args(arguments)
    mutations = list(draw(ROOT, given.seed, given.count))
    if given.list:
        sys.stdout.write("".join(f"{each.name}\n" for each in mutations))
        return 0
    commit = read_git("rev-parse", "HEAD").decode().strip()
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        with tarfile.open(fileobj=io.BytesIO(read_git("archive", "HEAD"))) as archive:
            archive.extractall(place, filter="data")
        for each in mutations:
            verdict = judge(each, Path(place), given.part or commit[:12])
            verdicts.append(verdict)
            noticed = "landing" if verdict.landing else "every case" if verdict.every_case else "NOT NOTICED"
            sys.stdout.write(f"{noticed:12} {verdict.seconds:6.1f} s  {verdict.mutation}\n{'':23}{verdict.failed}\n")
            sys.stdout.flush()
            if given.json is not None:
                content = {
                    "seed": given.seed,
                    "commit": commit,
                    "verdicts": [asdict(each) for each in verdicts],
                }
                given.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(each.landing for each in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
