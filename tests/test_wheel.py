"""The wheel, installed into a fresh environment: one package, and a service and a client that work from it."""

import ast
import contextlib
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hatch_build import MOVED, rewrite
from tests.api.server import held_port
from tests.kronoscope.conftest import FACTORIES, JOB, KRONOSCOPE, environment

ROOT = Path(__file__).resolve().parents[1]
SITE_PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment's folder of programs: the wheel, and of this environment the dependencies alone."""
    home = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    place = home / SITE_PACKAGES
    # files that this folder's own .pth files point to, such as the checkout, are not followed
    (place / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
    pip = [sys.executable, "-m", "pip", "--python", home / "bin/python"]
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", wheel],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return home / "bin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A caller's folder, whose modules have the names that the checkout's folders have."""
    home = tmp_path_factory.mktemp("caller")
    (home / "engine.py").write_text(FACTORIES)
    for name in set(MOVED) - {"engine"}:
        (home / f"{name}.py").write_text(f"raise RuntimeError('{name} of the caller')\n")
    (home / "job.yaml").write_text(JOB.replace("mine_for_kronoscope", "engine"))
    return home


def test_holds_one_package_and_nothing_that_imports_the_folders_of_a_checkout(wheel: Path) -> None:
    suspicious = re.compile(rf"\b(?:from|import)\b.*(?:(?<!kronoscope\.)\b(?:{'|'.join(MOVED)})\b|\\$)", re.MULTILINE)
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        top = {name.partition("/")[0] for name in names}
        assert {name for name in top if not name.endswith(".dist-info")} == {"kronoscope"}
        for folder in (*MOVED, "kronoscope"):
            of_checkout = {
                path.relative_to(ROOT).as_posix()
                for path in (ROOT / folder).rglob("*")
                if path.is_file() and "__pycache__" not in path.parts
            }
            prefix = "" if folder == "kronoscope" else "kronoscope/"
            assert {f"{prefix}{path}" for path in of_checkout} <= set(names)
        for name in names:
            # a line that could be such an import, or one that goes on: the others are parsed for nothing
            if not name.endswith(".py") or not suspicious.search(text := packed.read(name).decode()):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom):
                    assert (node.module or "").partition(".")[0] not in MOVED, name
                elif isinstance(node, ast.Import):
                    assert not {each.name.partition(".")[0] for each in node.names} & set(MOVED), name


@pytest.mark.nightly(
    covered_by=(
        "tests/test_wheel.py::test_holds_one_package_and_nothing_that_imports_the_folders_of_a_checkout",
        "tests/test_wheel.py::test_measures_in_a_program_without_taking_other_names",
    )
)
def test_serves_and_measures_beside_modules_of_the_same_names(installed: Path, folder: Path, tmp_path: Path) -> None:
    """A service, a client and a job in the foreground from the wheel; their numbers are those of the checkout."""
    told(run(installed / "kronoscope", "run", "job.yaml", "-o", "local", cwd=folder))
    with serving(installed, folder) as url:
        job = told(run(installed / "kronoscope", "submit", "job.yaml", "--url", url, cwd=folder)).strip()
        told(run(installed / "kronoscope", "watch", job, "--url", url, cwd=folder))
        served = told(run(installed / "kronoscope", "results", job, "--json", "--url", url, cwd=folder))
    (tmp_path / "mine_for_kronoscope.py").write_text(FACTORIES)
    (tmp_path / "job.yaml").write_text(JOB)
    told(run(*KRONOSCOPE, "run", "job.yaml", "-o", "local", cwd=tmp_path))
    wanted = numbers((tmp_path / "local/results.json").read_text())
    assert len(wanted) == 4
    assert numbers((folder / "local/results.json").read_text()) == wanted
    assert numbers(served) == wanted


LACKING = {
    "": (("serve --embedded", 'pip install "kronoscope[api,worker]"'), ("keys list", '"kronoscope[ledger]"')),
    "local": (("plan job.yaml", 'pip install "kronoscope[worker]"'),),
    "api": (("worker", 'pip install "kronoscope[worker]"'),),
    "worker": (("serve", 'pip install "kronoscope[api]"'),),
    "all": (),
}
IMPORTED = {
    "": ("kronoscope",),
    "local": ("kronoscope.local", "kronoscope.semiseparable"),
    "api": ("kronoscope.api.main",),
    "worker": ("kronoscope.local", "kronoscope.worker.app", "kronoscope.worker.execution.__main__"),
    "all": ("kronoscope.local", "kronoscope.api.main", "kronoscope.worker.app"),
}


_BY_THE_OTHERS = pytest.mark.nightly(
    covered_by="tests/test_wheel.py::test_each_extra_brings_what_its_commands_and_imports_need"
)


@pytest.mark.parametrize(
    "extra",
    [
        "",
        pytest.param("local", marks=pytest.mark.part(of=16, by=())),
        pytest.param("api", marks=pytest.mark.part(of=16, by=())),
        pytest.param("worker", marks=_BY_THE_OTHERS),
        pytest.param("all", marks=_BY_THE_OTHERS),
    ],
)
def test_each_extra_brings_what_its_commands_and_imports_need(
    installed: Path, folder: Path, tmp_path: Path, extra: str
) -> None:
    """The wheel among the distributions that the extra requires, one by one, and no others of this environment."""
    python = link(installed, tmp_path / "installed", dependencies(extra))
    command = (python, "-P", "-m", "kronoscope.cli.main")
    assert "capacity" in told(run(*command, "menu", cwd=folder))
    for words, remedy in LACKING[extra]:
        refused = run(*command, *words.split(), cwd=folder)
        assert refused.returncode == 2, refused.stderr
        assert remedy in " ".join(refused.stderr.split())
        assert "Traceback" not in refused.stderr
    program = f"from kronoscope import Client; import {', '.join(IMPORTED[extra])}"
    told(run(python, "-P", "-c", program, cwd=folder))
    if "kronoscope.local" not in IMPORTED[extra]:
        refused = run(python, "-P", "-c", "from kronoscope.local import measure", cwd=folder)
        *_, last = refused.stderr.splitlines()
        assert last.startswith("ModuleNotFoundError: kronoscope.local computes with PyTorch")
        assert last.endswith('pip install "kronoscope[local]"')
    if extra in ("worker", "all"):
        assert "eff. rank" in told(run(*command, "run", "job.yaml", "-o", tmp_path / "out", cwd=folder))


def dependencies(extra: str) -> set[str]:
    """Distributions that the wheel requires with an extra, followed from one to the next, without itself."""
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(f"kronoscope[{extra}]" if extra else "kronoscope")]
    while waiting:
        wanted = waiting.pop()
        for chosen in {"", *wanted.extras} - {each for name, each in seen if name == canonicalize_name(wanted.name)}:
            seen.add((canonicalize_name(wanted.name), chosen))
            for line in importlib.metadata.requires(wanted.name) or ():
                found = Requirement(line)
                if found.marker is None or found.marker.evaluate({"extra": chosen}):
                    waiting.append(found)
    return {name for name, _ in seen} - {"kronoscope"}


def link(installed: Path, home: Path, names: set[str]) -> Path:
    """A fresh environment's Python, with links to the installed wheel and to what the named distributions have here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    place = home / SITE_PACKAGES
    for each in (installed.parent / SITE_PACKAGES).glob("kronoscope*"):
        (place / each.name).symlink_to(each)
    for name in names:
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (place / top).exists():
                (place / top).symlink_to(str(found.locate_file(top)))
    return home / "bin/python"


def test_measures_in_a_program_without_taking_other_names(installed: Path, folder: Path) -> None:
    program = """
import sys, torch
from kronoscope.local import measure
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
measured = measure(model, [(torch.randn(16, 6), torch.arange(16) % 3)], task="classification")
print(len(measured.layers), *sorted({name.partition(".")[0] for name in sys.modules}), sep="\\n")
"""
    layers, *imported = told(run(installed / "python", "-P", "-c", program, cwd=folder)).split()
    assert layers == "2"
    assert "kronoscope" in imported
    assert not set(imported) & set(MOVED)


@pytest.mark.parametrize(
    ("written", "packed"),
    [
        ("from engine.errors import EngineError\n", "from kronoscope.engine.errors import EngineError\n"),
        ("import catalog\n", "import kronoscope.catalog as catalog\n"),
        ("import catalog as ours\n", "import kronoscope.catalog as ours\n"),
        ("if True:\n    from jobs import codec\n", "if True:\n    from kronoscope.jobs import codec\n"),
        ('run = ("-m", "worker.foreground")\n', 'run = ("-m", "kronoscope.worker.foreground")\n'),
        ('f = "engine.analyses.capacity:measure"\n', 'f = "kronoscope.engine.analyses.capacity:measure"\n'),
        ('task = "worker.tasks.ring"\n', 'task = "worker.tasks.ring"\n'),
        ('table = "jobs"\n', 'table = "jobs"\n'),
        ('say = "python -P -m migrations first"\n', 'say = "python -P -m kronoscope.migrations first"\n'),
        ("from kronoscope.cli import worker\n", "from kronoscope.cli import worker\n"),
    ],
)
def test_rewrites_imports_and_names_of_modules_alone(written: str, packed: str) -> None:
    assert rewrite(written, ROOT) == packed


def test_refuses_an_import_that_it_cannot_rewrite() -> None:
    with pytest.raises(ValueError, match=r"import engine.errors.*from package import module"):
        rewrite("import engine.errors\n", ROOT)


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        check=False, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def told(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def numbers(text: str) -> dict[tuple[str, str], Any]:
    """What every layer's row says, but for what differs from run to run: seconds and bytes seen."""
    return {(row["kind"], row["layer"]): (row["metrics"], row["record"]) for row in json.loads(text)["layers"]}


@contextlib.contextmanager
def serving(installed: Path, folder: Path) -> Iterator[str]:
    """``kronoscope serve --embedded`` of the wheel, started in the caller's folder."""
    listed = [f"--allow-factory=engine:{name}" for name in ("model", "data")]
    with held_port() as port, subprocess.Popen(
        [str(installed / "kronoscope"), "serve", "--embedded", "--port", str(port), "--data-dir", "data", *listed],
        cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True,
    ) as service:  # fmt: skip
        assert service.stderr is not None
        said = []
        for line in service.stderr:
            said.append(line)
            if line.startswith("ready:"):
                break
        try:
            assert said, "it never came up"
            assert said[-1].startswith("ready:"), "".join(said)
            yield f"http://127.0.0.1:{port}"
        finally:
            service.send_signal(signal.SIGINT)
            service.communicate(timeout=120)
