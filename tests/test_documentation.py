"""What the documents say is so: links lead somewhere, examples are accepted, the generated tables are current.

Run as a script, it writes the tables anew.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from api.settings import Settings
from catalog import DOCUMENT
from catalog.field_errors import spellings
from catalog.requests.job import JobDocument
from jobs.environment import EnvironmentSettings, bounds_of, variables_of
from jobs.s3_settings import S3Settings
from jobs.settings import LedgerSettings, RoleSettings, ServiceSettings, WebhookSettings
from tests.reference_pages import command_line_page, document_page, rest_page
from worker.lifetime import LifetimeSettings
from worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
OPERATIONS = ROOT / "docs" / "operations.md"
# written for a reader who copies them: the lines of the README that are job documents
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def parse(path: Path) -> JobDocument:
    # through JSON, as the client sends it; strict, as the API reads it
    document = YAML(typ="safe", pure=True).load(path.read_text())
    return TypeAdapter(DOCUMENT).validate_json(json.dumps(document), strict=True)


def spelling_table() -> str:
    known = sorted(spellings(DOCUMENT).items())
    rows = [f"| `{name}` | {place.written} |" for name, place in known if name != place.place]
    return "\n".join(["| you write | it is here |", "|---|---|", *rows]) + "\n"


def default_of(name: str, field: FieldInfo) -> str:
    shown = variables_of(name, field).shown
    if shown is not None:
        return shown
    value = field.default
    if isinstance(value, Path):
        return f"`{value}`"
    if name.endswith("_bytes") and value is not None:
        return f"{value // 2**20:,} MiB" if value < 2**30 else f"{value // 2**30:,} GiB"
    if value is None or value == () or field.is_required():
        return "none"
    return f"{value:g}" if isinstance(value, (int, float)) else f"`{value}`"


def settings_table() -> str:
    rows = ["| variable | read by | default | meaning |", "|---|---|---|---|"]
    models: dict[type[EnvironmentSettings], str] = {
        **dict.fromkeys((LedgerSettings, S3Settings, ServiceSettings), "both"),
        RoleSettings: "migration",
        Settings: "API",
        WebhookSettings: "webhooks",
        **dict.fromkeys((WorkerSettings, LifetimeSettings), "worker"),
    }
    for model, reader in models.items():
        for name, field in model.model_fields.items():
            names = variables_of(name, field).names
            if name in vars(model)["__annotations__"] and names:
                meaning = " ".join((field.description or "").split())
                assert meaning, f"{model.__name__}.{name} has no description"
                bounds = bounds_of(field)
                meaning += f" Takes {bounds}." if " to " in bounds else ""
                rows.append(
                    f"| {', '.join(f'`{each}`' for each in names)} | {reader} | {default_of(name, field)} | {meaning} |"
                )
    return "\n".join(rows) + "\n"


# each table: the page, its marker, what it is made by
TABLES = [(GLOSSARY, "spellings", spelling_table), (OPERATIONS, "settings", settings_table)]

PAGES = {
    "reference-cli.md": command_line_page,
    "reference-rest.md": rest_page,
    "reference-document.md": document_page,
}


def parts(page: Path, marker: str) -> tuple[str, str, str]:
    """The page up to the table, the table, and the page from its end on."""
    begin, end = f"<!-- {marker}: begin -->\n", f"<!-- {marker}: end -->\n"
    head, _, rest = page.read_text().partition(begin)
    table, _, tail = rest.partition(end)
    return head + begin, table, end + tail


@pytest.mark.parametrize(("page", "marker", "make"), TABLES, ids=["spellings", "settings"])
def test_generated_tables_are_current(page: Path, marker: str, make: Callable[[], str]) -> None:
    assert parts(page, marker)[1] == make(), "run: .venv/bin/python -P tests/test_documentation.py"


@pytest.mark.parametrize(("name", "make"), PAGES.items(), ids=PAGES)
def test_generated_pages_are_current(name: str, make: Callable[[], str]) -> None:
    assert (ROOT / "docs" / name).read_text() == make(), "run: .venv/bin/python -P tests/test_documentation.py"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_accepted(path: Path) -> None:
    parse(path)


def test_the_paper_preset_is_what_such_a_script_used() -> None:
    document = parse(ROOT / "examples" / "paper.yaml")
    assert document.stabilisation.damping == 1e-4
    assert document.stabilisation.damping_mode == "absolute"
    assert document.stabilisation.damping_split == "each"
    assert "reconstruction" in document.kinds
    assert document.stabilisation.kappa_max == 1e6
    assert document.collection.update_freq == 10
    assert document.collection.ema_decay is None
    assert document.collection.fisher == "empirical"
    assert document.collection.reduction == "gram"
    assert document.world_size == 1
    assert document.woodbury.policy == "all"
    assert document.woodbury.store_device == "auto"
    assert document.woodbury.dtype == "fp16"
    assert document.woodbury.eps == 1e-6


def markdown() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize("page", markdown(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert missing == []
    assert all((page.parent / target).resolve().is_relative_to(ROOT) for target in local)


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", "website/mkdocs.yml", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "decisions" / "0005-what-same-numbers-means.html").read_text()
    outside = re.findall(r'(?:src|href)="(https?://[^"]+)"', page)
    assert [each for each in outside if "mkdocs.org" not in each] == []  # nothing is fetched from elsewhere


def test_named_files_exist() -> None:
    """Files that prose names in backticks: a path with a folder and a known ending."""
    name = re.compile(
        r"`((?:api|catalog|docs|engine|examples|jobs|kronoscope|migrations|tests|worker)/[\w./-]+\.(?:py|md|yaml))`"
    )
    placeholders = ("sharpness",)  # the invented analysis of adding-an-analysis.md
    missing: dict[str, Any] = {}
    for page in markdown():
        gone = {
            found
            for found in name.findall(page.read_text())
            if not (ROOT / found).exists() and not any(word in found for word in placeholders)
        }
        if gone:
            missing[page.name] = gone
    assert missing == {}


if __name__ == "__main__":
    for page, marker, make in TABLES:
        head, _, tail = parts(page, marker)
        page.write_text(head + make() + tail)
    for name, make in PAGES.items():
        (ROOT / "docs" / name).write_text(make())
