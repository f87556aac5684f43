"""The house's rules, checked on the tree itself: floors, names, sizes, and what an import drags in."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from catalog import ANALYSES

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("api", "catalog", "engine", "jobs", "kronoscope", "migrations", "worker")
NAMES_WITHOUT_A_NOUN = {"utils", "helpers", "common", "misc", "base", "core", "manager", "types", "constants"}
LONGEST_FILE = 400
TEXT = {".cfg", ".css", ".html", ".ini", ".js", ".json", ".md", ".mako", ".py", ".toml", ".txt", ".yaml", ".yml", ""}

ASKS_BY_NAME = {"api/requests/examples.py": "documents that name the analyses which they ask for"}
"""Files that ask for an analysis by its name, until its own file says what they ask."""
WORDS_OF_DOCUMENTS = {"factors", "spectrum"}
"""Kinds that are names of other things too."""


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=300,
    )
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    # the folder it runs in comes first on its path, before the installed packages
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def copied_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", tree)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def test_the_import_contracts_hold(copied_tree: Path) -> None:
    report = lint_imports(copied_tree)
    assert report.returncode == 0, report.stdout + report.stderr
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", report.stdout)


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(
    ("planted_in", "line"),
    [
        ("jobs/records.py", "import torch"),
        ("engine/errors.py", "import jobs"),
        ("catalog/record.py", "import pydantic"),
        ("engine/workspace.py", "import numpy"),
        ("api/__init__.py", "import worker"),
        ("kronoscope/cli/main.py", "import jobs"),
    ],
)
def test_a_planted_violation_is_caught(copied_tree: Path, planted_in: str, line: str) -> None:
    victim = copied_tree / planted_in
    before = victim.read_text()
    victim.write_text(f"{before}\n{line}\n")
    try:
        report = lint_imports(copied_tree)
    finally:
        victim.write_text(before)
    assert report.returncode == 1, report.stdout + report.stderr
    assert "BROKEN" in report.stdout
    assert planted_in.removesuffix(".py").removesuffix("/__init__").replace("/", ".") in report.stdout


def test_catalog_needs_no_installed_package() -> None:
    names = sorted(f"catalog.{path.stem}" for path in (ROOT / "catalog").glob("*.py") if path.stem != "__init__")
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import catalog, {', '.join(names)}; print('imported')"
    # -S leaves site-packages out, -I the environment and the working directory
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "imported\n", done.stderr


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(
    "module",
    [
        pytest.param("api.main, api.__main__", id="api.main"),
        "jobs.autoscale.__main__",
        "jobs.repository.store",
        "kronoscope.cli",
        "worker.app",
        "worker.embedded",
        "worker.supervision.supervisor",
        "worker.foreground",
        "worker.process.guardian",
    ],
)
def test_a_process_that_does_not_compute_imports_no_torch(module: str, tmp_path: Path) -> None:
    heavy = {"torch", "engine", "transformers"}
    if module.startswith("api."):
        heavy |= {"worker", "safetensors", "numpy", "sklearn"}
    program = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("KRONOSCOPE_")},
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("kind", ANALYSES)
def test_every_analysis_names_a_class_of_the_engine(kind: str) -> None:
    module, _, name = ANALYSES[kind].implementation.partition(":")
    assert module.startswith("engine.analyses.")
    assert callable(getattr(importlib.import_module(module), name))


def named_kinds(node: ast.AST) -> set[str]:
    """The kinds that a constant, or a literal of several, names."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {str(part.value) for part in parts if isinstance(part, ast.Constant) and part.value in ANALYSES}


def asks_for_a_kind(node: ast.AST) -> bool:
    """Whether an expression compares with a kind, looks one up, or is a table of kinds."""
    match node:
        case ast.Compare(left=left, comparators=others):
            kinds = set().union(*map(named_kinds, [left, *others]))
            compared = " ".join(ast.unparse(each) for each in (left, *others) if not named_kinds(each))
            return bool(kinds - WORDS_OF_DOCUMENTS) or bool(kinds and re.search("kind|analys", compared))
        case ast.Call(func=ast.Attribute(attr="of"), args=arguments):
            return any(map(named_kinds, arguments))
        case ast.Call(func=ast.Name(id="getattr") | ast.Attribute(attr="get" | "index"), args=arguments):
            return any(named_kinds(argument) - WORDS_OF_DOCUMENTS for argument in arguments)
        case ast.Subscript(slice=index):
            return bool(named_kinds(index) - WORDS_OF_DOCUMENTS)
        case ast.Dict(keys=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return len(parts) > 1 and all(part is not None and named_kinds(part) for part in parts)
    return False


def script_asks_for_a_kind(text: str) -> bool:
    """Whether a script of the page compares with a kind, or has a property of its name."""
    every, plain = "|".join(ANALYSES), "|".join(kind for kind in ANALYSES if kind not in WORDS_OF_DOCUMENTS)
    asked = rf"""["'`](?:{plain})["'`]|[!=]==? ?["'`](?:{every})["'`]|\.(?:{plain})\b|summary\??\.(?:{every})\b"""
    return re.search(rf"{asked}|^ *(?:{every}):", text, re.MULTILINE) is not None


_COULD_BE_FOUND = re.compile(
    rf"^[ \t]+(?:from|import)\b|[:;][ \t]*(?:from|import)\b|[\"'](?:{'|'.join(ANALYSES)})[\"']", re.MULTILINE
)


@dataclass(frozen=True)
class Looked:
    """Findings of several rules in a module, which is parsed once."""

    silent: bool
    """Whether it has code and no sentence at its top."""
    asks_for_a_kind: bool
    hidden_imports: tuple[int, ...]
    """Lines of imports within functions."""


@cache
def looked_at(path: Path) -> Looked:
    text = path.read_text()
    tree = ast.parse(text)
    first = (ast.get_docstring(tree) or "").split("\n\n")[0].strip()
    # nothing is found where the word is not: an import that is indented, or follows a colon; a kind in quotes
    nodes = list(ast.walk(tree)) if _COULD_BE_FOUND.search(text) else []
    hidden = (
        node.lineno
        for function in nodes
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    return Looked(
        silent=bool(tree.body) and not first.endswith((".", ":", "?")),
        asks_for_a_kind=any(map(asks_for_a_kind, nodes)),
        hidden_imports=tuple(hidden),
    )


def test_only_the_files_of_an_analysis_ask_for_it_by_name() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in modules()
        if path.parent.relative_to(ROOT).parts[:2] not in (("catalog", "analyses"), ("engine", "analyses"))
        if looked_at(path).asks_for_a_kind
    }
    scripts = [path for path in (ROOT / "api/dashboard").rglob("*.js") if "vendor" not in path.parts]
    found |= {str(path.relative_to(ROOT)) for path in scripts if script_asks_for_a_kind(path.read_text())}
    assert len(scripts) > 10
    assert found == set(ASKS_BY_NAME)


@pytest.mark.parametrize(
    "line",
    [
        "kind == 'factors'",
        "row.kind in ('capacity', 'other')",
        "'spectrum' in document.kinds",
        "STAGES = {'capacity': 1, 'spectrum': 2}",
        "BY_OWNERS = frozenset(('factors', 'capacity'))",
        "options.of('factors')",
        "getattr(document, 'natural_gradient', None)",
    ],
)
def test_a_question_for_a_kind_is_found(line: str) -> None:
    assert any(map(asks_for_a_kind, ast.walk(ast.parse(line))))


@pytest.mark.parametrize("line", ["document.get('factors')", "'factors' in options.keep", "{'factors': 1, 'model': 2}"])
def test_a_word_of_the_document_is_no_question_for_a_kind(line: str) -> None:
    assert not any(map(asks_for_a_kind, ast.walk(ast.parse(line))))


@pytest.mark.parametrize(
    "line", ['if (kind === "factors") {', "  spectrum: (summary) => [", "show(summary?.spectrum)", "results.capacity"]
)
def test_a_scripts_question_for_a_kind_is_found(line: str) -> None:
    assert script_asks_for_a_kind(line)
    assert not script_asks_for_a_kind('h("section", { id: "spectrum" }, document.factors)')


def test_modules_are_named_after_what_they_hold() -> None:
    bad = [str(path.relative_to(ROOT)) for path in modules() if NAMES_WITHOUT_A_NOUN & {path.stem, path.parent.name}]
    assert bad == []


def test_no_file_is_longer_than_one_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_every_module_opens_with_a_sentence() -> None:
    assert [str(path.relative_to(ROOT)) for path in modules() if looked_at(path).silent] == []


def test_imports_stand_at_the_top() -> None:
    """Only the child's ``resolve`` imports while it runs, and it does so by name."""
    hidden = [f"{path.relative_to(ROOT)}:{line}" for path in modules() for line in looked_at(path).hidden_imports]
    assert hidden == []


def test_no_file_speaks_of_the_machine_it_was_written_on() -> None:
    homes = re.compile(r"(?<![\w./-])/(?:home|Users)/\w+")
    found = []
    for path in tracked():
        if path.suffix in TEXT:
            text = path.read_text(errors="replace")
            if str(ROOT) in text or homes.search(text):
                found.append(str(path.relative_to(ROOT)))
    assert found == []
