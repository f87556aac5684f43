"""The cost of the walls between jobs: from claim to first batch, and to publish a file.

Each measurement is a process of its own, in turns with one of another checkout, so that a machine that becomes slower
slows both. Both run jobs as users of their own, as Compose does, which asks for root and an interpreter that every user
may execute.

    python -m benchmarks.walls [--before CHECKOUT] [--rounds 20]
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

JOBS_USER = 20_000
JOBS_OF_A_PROCESS = 2
"""The first one of a process also trains the model and imports what the others find imported."""
PUBLISHED_BYTES = 2**30
_STAGE = "collection"
DOCUMENT = {
    "kind": "factors",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "cache": "off",
}


def seconds_to_first_batch(place: Path) -> list[float]:
    """From the claim of each job to its first batch, as its progress in the ledger shows it.

    Args:
        place: A folder that every user may enter.

    Returns:
        Seconds of each job but the first.
    """
    from jobs.codec import parse_document  # noqa: PLC0415 - of the checkout that is measured
    from jobs.queue.claims import claim  # noqa: PLC0415
    from jobs.records import LOCAL_TENANT  # noqa: PLC0415
    from jobs.repository.store import read_job  # noqa: PLC0415
    from jobs.repository.submission import submit  # noqa: PLC0415
    from jobs.schema.database import open_database, upgrade_schema  # noqa: PLC0415
    from worker.settings import WorkerSettings  # noqa: PLC0415
    from worker.supervision.supervisor import Supervisor  # noqa: PLC0415

    url = f"sqlite:///{place / 'ledger.sqlite'}"
    upgrade_schema(url)
    engine = open_database(url)
    environment = {
        "KRONOSCOPE_DATABASE_URL": url,
        "KRONOSCOPE_ARTIFACTS": str(place / "artifacts"),
        "KRONOSCOPE_MODEL_STORE": str(place / "models"),
        "KRONOSCOPE_CHILD_USER": str(JOBS_USER),
        "KRONOSCOPE_THREADS": "1",
    }
    for name in ("artifacts", "models"):
        (place / name).mkdir(mode=0o777)
        (place / name).chmod(0o777)
    settings = WorkerSettings.from_environment(environment)
    share = _found("worker.service", "worker.agent.isolation")
    share(settings.ledger.artifact_root, settings.model_store)
    found = []
    for _ in range(JOBS_OF_A_PROCESS):
        job = submit(engine, LOCAL_TENANT, parse_document(json.dumps(DOCUMENT).encode())).job.id
        begun = time.monotonic()
        held = claim(engine, job, "benchmark", secrets.token_hex(8), 3600)
        assert held is not None
        running = threading.Thread(target=Supervisor(engine, held, settings).run)
        running.start()
        seen = None
        while running.is_alive() and seen is None:
            told = read_job(engine, LOCAL_TENANT, job)
            progress: Any = None if told is None else told.progress
            if progress is not None and progress["stage"] == _STAGE:
                seen = time.monotonic() - begun
            time.sleep(0.002)
        running.join()
        ended = read_job(engine, LOCAL_TENANT, job)
        assert ended is not None
        assert ended.state == "succeeded", ended.failure
        assert seen is not None
        found.append(seen)
    return found[1:]


def _found(*modules: str) -> Callable[[Path, Path], None]:
    """Find the function that gives the folders their rights when a worker starts, in this version or an earlier one."""
    for each in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return cast("Callable[[Path, Path], None]", importlib.import_module(each).share_folders)
    raise ImportError("this version has no `share_folders`")


def seconds_to_publish(place: Path) -> tuple[float, float]:
    """To publish one large file, and to copy it and bring it to the disk.

    Args:
        place: A folder.

    Returns:
        Seconds of both.
    """
    from jobs.objects.artifacts import ArtifactFolder  # noqa: PLC0415 - of the checkout that is measured
    from jobs.schema.identifiers import new_id  # noqa: PLC0415

    folder, job = ArtifactFolder(place / "published"), new_id()
    staged = folder.attempt_dir(job, 1) / "large.bin"
    digest, part = hashlib.sha256(), os.urandom(2**20)
    with staged.open("wb") as file:
        for _ in range(PUBLISHED_BYTES // len(part)):
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    begun = time.monotonic()
    folder.publish("local", job, 1, "large.bin", sha256=digest.hexdigest(), size_bytes=PUBLISHED_BYTES)
    published = time.monotonic() - begun
    copy = place / "copy.bin"
    begun = time.monotonic()
    with staged.open("rb") as source, copy.open("wb") as target:
        while content := source.read(2**20):
            target.write(content)
        target.flush()
        os.fsync(target.fileno())
    return published, time.monotonic() - begun


def measure() -> dict[str, Any]:
    """One process of one checkout."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("KRONOSCOPE_BENCHMARK_FOLDER")) as folder:
        place = Path(folder)
        place.chmod(0o755)
        published, copied = seconds_to_publish(place)
        return {"first_batch": seconds_to_first_batch(place), "published": published, "copied": copied}


def measured(checkout: Path) -> dict[str, Any]:
    """One process of a checkout, and what it found."""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-P", str(Path(__file__).absolute()), "--measure"]
    done = subprocess.run(command, env=given, cwd=checkout, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3_000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure in turns, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout to measure in turns with this one")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    from benchmarks import results_file  # noqa: PLC0415 - not in a process of another checkout

    checkouts = {"now": Path(__file__).absolute().parent.parent}
    if options.before is not None:
        checkouts["before"] = options.before.absolute()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            found[name].append(measured(checkout))
    figures: dict[str, Any] = {"rounds": options.rounds, "measured": found}
    for name, rounds in found.items():
        figures[name] = {
            "first_batch_seconds": statistics.median(each for one in rounds for each in one["first_batch"]),
            "published_seconds": statistics.median(one["published"] for one in rounds),
            "copied_seconds": statistics.median(one["copied"] for one in rounds),
        }
    now = figures["now"]
    publishing = "publishing 1 GiB over copying it to the disk"
    claims = [results_file.claim(publishing, now["published_seconds"] / now["copied_seconds"], 3)]
    added = "milliseconds from claim to first batch that the walls add"
    if "before" in figures:
        more = now["first_batch_seconds"] - figures["before"]["first_batch_seconds"]
        claims.append(results_file.claim(added, 1000 * more, 50))
    else:
        claims.append(results_file.not_measured(added, 50, "no other checkout was named"))
    results_file.write("walls", claims, figures)


if __name__ == "__main__":
    main()
