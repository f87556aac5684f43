"""A Compose project of its own: brought up from this tree, spoken to through the CLI, removed afterwards."""

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.machine.stopwatch import Stopwatch

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "walls" / "programs"
FACTORY = "kronoscope_test_evil:model"
"""One of the programs: every job may name it."""
DIGITS = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}
ENDED = ("succeeded", "failed", "cancelled")
SERVICES = ("postgres", "redis", "api", "worker", "webhooks")


def run(*command: str, timeout: float = 120, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Stack:
    """One project: its name, its passwords, its port."""

    def __init__(self, folder: Path) -> None:
        self.project = f"kronoscope-test-{secrets.token_hex(4)}"
        self.port = free_port()
        self.passwords = {
            name: secrets.token_hex(24)
            for name in (
                *("POSTGRES_PASSWORD", "MIGRATE_PASSWORD", "API_PASSWORD", "WORKER_PASSWORD", "WEBHOOKS_PASSWORD"),
                *("REDIS_PASSWORD", "KRONOSCOPE_KEY_SECRET", "KRONOSCOPE_WEBHOOK_KEY"),
            )
        }
        lines = [f"{name}={value}" for name, value in self.passwords.items()]
        lines += [f"KRONOSCOPE_PORT={self.port}", f"SECRETS_FOLDER={folder / '.secrets'}"]
        lines += [f"KRONOSCOPE_ALLOW_FACTORIES={FACTORY}", ""]
        self.settings = folder / ".env"
        self.settings.write_text("\n".join(lines))
        self.programs = folder / "programs.yml"
        worker = {"volumes": [f"{PROGRAMS}:/programs:ro"], "environment": {"KRONOSCOPE_FACTORY_PATH": "/programs"}}
        self.programs.write_text(json.dumps({"services": {"worker": worker}}))
        subprocess.run(["make", "-f", ROOT / "Makefile", "secret-files"], cwd=folder, check=True, capture_output=True)

    def compose(self, *words: str, timeout: float = 120, **variables: str) -> str:
        # the caller's own .env and COMPOSE_FILE are for the caller's own service
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}
        files = ["--file", str(ROOT / "docker-compose.yml"), "--file", str(self.programs)]
        files += ["--env-file", str(self.settings)]
        return run(
            "docker",
            "compose",
            "--project-name",
            self.project,
            *files,
            *words,
            timeout=timeout,
            environment=environment | variables,
        )

    def up(self, workers: int = 2, **variables: str) -> None:
        self.compose("up", "--detach", "--scale", f"worker={workers}", timeout=300, **variables)
        self.await_healthy(workers)

    def key(self, tenant: str) -> str:
        command = ("run", "--rm", "--no-TTY", "--no-deps", "api", "kronoscope", "keys", "create", "--tenant", tenant)
        (key,) = [word for word in self.compose(*command).split() if word.startswith("kron_")]
        return key

    def await_healthy(self, workers: int = 2) -> None:
        def healthy() -> bool:
            states = [self.inspect(container)["State"] for container in self.containers(*SERVICES)]
            return len(states) == len(SERVICES) - 1 + workers and all(
                state.get("Health", {}).get("Status") == "healthy" for state in states
            )

        try:
            until(healthy, 120, "every container is healthy")
        except AssertionError as error:
            logs = self.compose("logs", "--no-color", "--tail", "40")
            raise AssertionError(f"{error}\n{self.compose('ps', '--all')}\n{logs}") from None

    def containers(self, *services: str) -> list[str]:
        return self.compose("ps", "--all", "--quiet", *services).split()

    def inspect(self, container: str) -> dict[str, Any]:
        (found,) = json.loads(run("docker", "inspect", container))
        return dict(found)

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {key}"},
            trust_env=False,
            timeout=300,
            transport=httpx.HTTPTransport(retries=3),
        )

    def sql(self, query: str) -> list[str]:
        command = ("psql", "--username", "kronoscope", "--no-align", "--tuples-only", "--command", query)
        return self.compose("exec", "--no-TTY", "postgres", *command).splitlines()


def until(holds: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true answer; containers give no event to wait for, so it is asked again."""
    watch = Stopwatch()
    while True:
        answer = holds()
        if answer:
            return answer
        assert watch.seconds() < seconds, f"after {seconds:g} s it does not hold yet that {what}"
        time.sleep(0.3)


def submit(client: httpx.Client, document: dict[str, Any] = DIGITS) -> str:
    answer = client.post("/v1/jobs", json=document)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def ended(client: httpx.Client, job_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        job = client.get(f"/v1/jobs/{job_id}").raise_for_status().json()
        return job if job["state"] in ENDED else None

    return dict(until(look, 600, f"job {job_id} has ended"))


def digests(client: httpx.Client, job_id: str) -> dict[tuple[str, int], str]:
    page = client.get(f"/v1/jobs/{job_id}/layers", params={"limit": 100}).raise_for_status().json()
    return {(row["kind"], row["ordinal"]): row["sha256"] for row in page["items"]}
