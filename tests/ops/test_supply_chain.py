"""What images install: locked by digest, the same versions as everywhere, and nothing that a lock lacks."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {"api": ("api",), "worker": ("worker",)}


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", path.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("lock", ["build", "api", "worker"])
def test_locks_the_versions_of_the_constraints_each_with_digests(lock: str) -> None:
    path = ROOT / "ops/locks" / f"{lock}.txt"
    locked = pins(path)
    everywhere = pins(ROOT / "constraints.txt")
    assert locked == {name: everywhere[name] for name in locked}
    entries = re.split(r"^(?=[\w.-]+(?:\[.*\])?==)", path.read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == len(locked)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


@pytest.mark.parametrize("lock", EXTRAS)
def test_a_lock_holds_whatever_its_image_needs_but_torch(lock: str) -> None:
    """Followed from package to package as they are installed here, so that a new dependency cannot be forgotten."""
    seen: set[str] = set()
    waiting = [Requirement(f"kronoscope[{','.join(EXTRAS[lock])}]")]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name == "torch":
            continue
        seen.add(name)
        for line in importlib.metadata.requires(name) or ():
            found = Requirement(line)
            needed = any(
                found.marker is None or found.marker.evaluate({"extra": extra}) for extra in (wanted.extras or {""})
            )
            if needed and (canonicalize_name(found.name) not in seen or found.extras):
                waiting.append(found)
    assert seen - {"kronoscope"} <= set(pins(ROOT / "ops/locks" / f"{lock}.txt"))


REGISTRY = """#!/bin/sh
# an engine that holds images of a registry, and logs what it is asked
echo "$@" >> "$LOG"
for tag; do :; done
[ "$1" = pull ] && { [ "$tag" != "$AWAY" ]; exit; }
[ "$tag" = "$BUILT" ] && echo '[]' && exit 0
echo "[\\"other/name@sha256:0\\", \\"${tag%:*}@sha256:abc\\"]"
"""


def pin(folder: Path, *, built: str = "", away: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "bin").mkdir()
    (folder / "bin/docker").write_text(REGISTRY)
    (folder / "bin/docker").chmod(0o755)
    files = [str(path) for path in sorted(ROOT.glob("docker-compose*.yml"))]
    return subprocess.run(
        [sys.executable, ROOT / "ops/pin_images.py", *files],
        check=False, cwd=folder, capture_output=True, text=True, timeout=60,
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "LOG": str(folder / "log"), "BUILT": built, "AWAY": away},
    )  # fmt: skip


def test_pins_every_image_of_a_registry(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("REDIS_PASSWORD=secret\nREDIS_IMAGE=redis:7@sha256:old\n")
    assert pin(tmp_path).returncode == 0
    assert (tmp_path / ".env").read_text().splitlines() == [
        "REDIS_PASSWORD=secret",
        "NGINX_IMAGE=nginx:1.28@sha256:abc",
        "POSTGRES_IMAGE=postgres:17@sha256:abc",
        "PROMETHEUS_IMAGE=prom/prometheus:v3.5.0@sha256:abc",
        "PYTHON_IMAGE=python:3.11-slim@sha256:abc",
        "REDIS_IMAGE=redis:7@sha256:abc",
    ]
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [({"built": "redis:7"}, "redis:7 was built here"), ({"away": "postgres:17"}, "postgres:17 could not be pulled")],
)
def test_without_every_digest_nothing_is_pinned(tmp_path: Path, fault: dict[str, str], said: str) -> None:
    (tmp_path / ".env").write_text("REDIS_PASSWORD=secret\n")
    ended = pin(tmp_path, **fault)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert (tmp_path / ".env").read_text() == "REDIS_PASSWORD=secret\n"


def test_no_image_stands_in_a_compose_file_by_its_tag_alone() -> None:
    """What we build has no registry; every other image can be pinned."""
    for path in ROOT.glob("docker-compose*.yml"):
        for image in re.findall(r"^\s+image: (\S+)", path.read_text(), re.MULTILINE):
            assert image in {"kronoscope-api", "kronoscope-worker"} or re.fullmatch(r"\$\{\w+_IMAGE:-\S+\}", image)
    assert "FROM ${PYTHON_IMAGE} AS base" in (ROOT / "Dockerfile").read_text()
