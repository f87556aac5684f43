"""A new analysis, pasted from the page that shows how to add one, goes through everything that a job goes through.

The page's files are added to a copy of the product, which an environment of its own finds before the checkout.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from playwright.sync_api import expect

from kronoscope.client import Client
from kronoscope.local import load_factors
from tests.api.chromium import PATIENCE_MS, chromium
from tests.api.server import held_port

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "adding-an-analysis.md"
COPIED = ("catalog", "engine")
_BLOCK = re.compile(r"^```python fragment\n(.*?)^```$", re.DOTALL | re.MULTILINE)
JOB = {
    "kind": ["factors", "sharpness"],
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits", "limit": 128},
    "task": {"type": "classification"},
    "sharpness": {"iterations": 400},
}
SLOW = {**JOB, "sharpness": {"iterations": 30_000}}


@dataclass(frozen=True)
class Product:
    """The product with one more analysis."""

    python: Path
    folder: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line to its end."""
        return subprocess.run(
            self.command(*arguments), cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def command(self, *arguments: str) -> list[str]:
        """Return the command line's command."""
        return [str(self.python), "-P", "-c", "from kronoscope.cli import main; main()", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of its processes."""
        given = {name: value for name, value in os.environ.items() if not name.startswith("KRONOSCOPE_")}
        return {**given, "OMP_NUM_THREADS": "1", "KRONOSCOPE_THREADS": "1", "COLUMNS": "140", "HOME": str(self.folder)}


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Product:
    place = tmp_path_factory.mktemp("product")
    tree = place / "tree"
    for name in COPIED:
        # with what is compiled, which is not compiled anew, but for what is being written
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    record, imported, listed, computed = (found[1] for found in _BLOCK.finditer(PAGE.read_text()))
    (tree / "catalog" / "analyses" / "sharpness.py").write_text(record)
    (tree / "engine" / "analyses" / "sharpness.py").write_text(computed)
    menu = tree / "catalog" / "__init__.py"
    text, count = re.subn(r"^ANALYSES: .*?^}\n", listed, menu.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert count == 1
    menu.write_text(
        text.replace("from catalog.analyses.spectrum import", f"{imported}from catalog.analyses.spectrum import")
    )

    home = place / "environment"
    packages = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    packages.mkdir(parents=True)
    (home / "bin").mkdir()
    python = home / "bin" / "python"
    python.symlink_to(Path(sys.executable).resolve())
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", home)
    added = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (packages / "new.pth").write_text(f"{tree}\n{added}\n")
    (place / "job.json").write_text(json.dumps(JOB))
    (place / "wrong.json").write_text(json.dumps({**JOB, "sharpness": {"iterations": 0}}))
    return Product(python=python, folder=place)


@pytest.fixture(scope="module")
def foreground(product: Product) -> dict[str, Any]:
    """A run in the foreground: what it printed, and its results."""
    done = product.run("run", "job.json", "--output", "out", "--offline")
    assert done.returncode == 0, done.stderr
    return {"printed": done.stdout, **json.loads((product.folder / "out" / "results.json").read_text())}


def sharpness(rows: list[Any]) -> dict[str, Any]:
    return {row["layer"]: row["metrics"] for row in rows if row["kind"] == "sharpness"}


@pytest.mark.part(of=2, law="two files are a new analysis")
def test_two_files_and_a_word_are_all(product: Product) -> None:
    listed = product.run("menu")
    assert "The largest eigenvalue of each layer's curvature." in " ".join(listed.stdout.split())
    changed = {
        str(path.relative_to(product.folder / "tree"))
        for path in (product.folder / "tree").rglob("*.py")
        if not (ROOT / path.relative_to(product.folder / "tree")).exists()
        or path.read_bytes() != (ROOT / path.relative_to(product.folder / "tree")).read_bytes()
    }
    assert changed == {"catalog/__init__.py", "catalog/analyses/sharpness.py", "engine/analyses/sharpness.py"}


@pytest.mark.nightly(
    covered_by=(
        "tests/kronoscope/cli/test_run_job.py::test_bad_input_is_one_sentence_per_fault_and_leaves_nothing",
        "tests/test_new_analysis.py::test_the_plan_has_its_bytes_and_seconds",
    )
)
def test_a_wrong_option_is_refused_by_name(product: Product) -> None:
    done = product.run("run", "wrong.json", "--output", "never")
    assert done.returncode == 2
    assert "/sharpness/iterations is 0; take 1 or more" in done.stderr


def test_the_plan_has_its_bytes_and_seconds(product: Product) -> None:
    done = product.run("plan", "job.json", "--offline", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    plan = plan.get("plan", plan)
    stage = plan["stages"]["sharpness"]
    assert stage["seconds"] > 0
    terms = {term["layer"]: term["size_bytes"] for term in plan["terms"] if term["name"] == "matrix in float64"}
    assert terms["conv2"] == 8 * 145**2
    assert terms["head"] == 8 * 513**2
    assert stage["host_bytes"] >= max(terms.values())


@pytest.mark.part(of=2, law="two files are a new analysis")
def test_numbers_are_those_of_the_dense_block(product: Product, foreground: dict[str, Any]) -> None:
    stored = load_factors(product.folder / "out" / "artifacts" / "factors")
    rows = sharpness(foreground["layers"])
    for name in ("conv1", "conv2", "head"):
        layer = stored[name]
        block = torch.linalg.eigvalsh(layer.A.double())[-1] * torch.linalg.eigvalsh(layer.G.double())[-1]
        assert rows[name]["largest_eigenvalue"] == pytest.approx(float(block), rel=1e-6)
        assert rows[name]["largest_step"] == pytest.approx(2 / float(block), rel=1e-6)
    largest = max(row["largest_eigenvalue"] for row in rows.values())
    assert foreground["summary"]["sharpness"]["largest_eigenvalue"] == largest


def test_table_and_text_speak_of_it(product: Product, foreground: dict[str, Any]) -> None:
    heading = next(line for line in foreground["printed"].splitlines() if "λ_max" in line and "┃" in line)
    assert [cell.strip() for cell in heading.split("┃")][-2:] == ["λ_max", "step"]
    assert re.search(r"^sharpness: 5 layers; .*; λ_max [\d.e-]+$", foreground["printed"], re.MULTILINE)
    said = product.run("results", "out", "--methods").stdout
    assert "the largest eigenvalue of each layer's block by 400 power iterations" in " ".join(said.split())


@pytest.fixture(scope="module")
def url(product: Product) -> Iterator[str]:
    with held_port() as port, subprocess.Popen(
        product.command("serve", "--embedded", "--port", str(port), "--data-dir", "data"),
        cwd=product.folder, env=product.environment, stderr=subprocess.PIPE, text=True,
    ) as serving:  # fmt: skip
        assert serving.stderr is not None
        said = []
        for line in serving.stderr:
            said.append(line)
            if line.startswith("ready:"):
                break
        assert said[-1:], "it never came up"
        assert said[-1].startswith("ready:"), "".join(said)
        yield f"http://127.0.0.1:{port}"
        serving.send_signal(signal.SIGINT)
        serving.communicate(timeout=300)


@pytest.mark.nightly(
    covered_by=(
        "tests/test_new_analysis.py::test_table_and_text_speak_of_it",
        "tests/chaos/test_kill_matrix.py::test_every_job_ends_as_if_nobody_had_killed_anything",
        "tests/api/routes/test_dashboard.py::test_a_new_analysis_is_shown_by_its_record_alone",
    )
)
def test_a_killed_job_goes_on_and_the_page_shows_it(url: str, product: Product, foreground: dict[str, Any]) -> None:
    with Client(url) as client:
        job = client.submit(SLOW)
        wait_for(lambda: (client.job(job.id).progress or job.progress) and _rows(client, job.id))
        kill_child(product.python)
        wait_for(lambda: client.job(job.id).ended)
        ended = client.job(job.id)
        assert (ended.state, ended.attempt) == ("succeeded", 2)
        rows = {row.layer: row for row in client.layers(job.id) if row.kind == "sharpness"}
    expected = sharpness(foreground["layers"])
    assert rows.keys() == expected.keys()
    for name, row in rows.items():
        assert row.metrics["largest_eigenvalue"] == pytest.approx(expected[name]["largest_eigenvalue"], rel=1e-6)
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{url}/#/jobs/{job.id}")
        expect(page.get_by_role("heading", name="Sharpness", level=2)).to_be_visible(timeout=PATIENCE_MS)
        page.get_by_role("button", name="sharpness", exact=True).click()
        table = page.get_by_role("region", name="Layer table")
        expect(table.get_by_role("button", name="Largest step")).to_be_visible(timeout=PATIENCE_MS)
        expect(table.get_by_role("row")).to_have_count(6, timeout=PATIENCE_MS)


def _rows(client: Client, job_id: str) -> bool:
    return any(row.kind == "sharpness" for row in client.layers(job_id))


def kill_child(python: Path) -> None:
    """Kill the process that computes."""
    found = [
        each
        for each in psutil.process_iter(["cmdline"])
        if str(python) in (each.info["cmdline"] or ()) and "worker.execution" in (each.info["cmdline"] or ())
    ]
    assert found
    for each in found:
        each.send_signal(signal.SIGKILL)


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
