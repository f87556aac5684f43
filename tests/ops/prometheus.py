"""A real Prometheus of the tests' own: it scrapes one API each second and evaluates rules as often."""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from ruamel.yaml import YAML

from tests.machine.stopwatch import until
from tests.servers import hold_port, prometheus_binary

START_SECONDS = 180
STOP_SECONDS = 60
RULES = Path(__file__).resolve().parents[2] / "ops/alerts.yml"


class Prometheus:
    """One that runs."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def query(self, expression: str) -> list[dict[str, str]]:
        """The labels of what the expression finds now."""
        answer = self._client.get("/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, answer.text
        return [dict(each["metric"]) for each in answer.json()["data"]["result"]]

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        return {each["alertname"] for each in self.query('ALERTS{alertstate="firing"}')}

    def ever_fired(self) -> set[str]:
        """The names of those that fired since the start."""
        return {each["alertname"] for each in self.query('last_over_time(ALERTS{alertstate="firing"}[1h])')}

    def await_firing(self, *names: str, seconds: float = 300, meanwhile: Callable[[], object] = bool) -> None:
        """Wait until all of them fire at once; ``meanwhile`` is called before each look."""

        def fire() -> bool:
            meanwhile()
            return set(names) <= self.firing()

        until(fire, seconds, lambda: f"{set(names) - self.firing()} do not fire")

    def await_silence(self, *names: str, seconds: float = 300) -> None:
        """Wait until none of them fires."""
        until(lambda: not set(names) & self.firing(), seconds, lambda: f"{set(names) & self.firing()} still fire")

    def standing(self) -> set[str]:
        """The names of the alerts that fire now, or will soon if nothing changes."""
        return {each["alertname"] for each in self.query("ALERTS")}

    def scrapes(self) -> bool:
        """Whether it has read the API's metrics, with all that the ledger tells."""
        return bool(self.query("kronoscope_leases_reaped_total"))


def hurried(pending: str) -> str:
    """The rules as they are, their expressions untouched, but pending for this long before they fire."""
    document = YAML(typ="safe", pure=True).load(RULES.read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = pending
    return json.dumps(document)


@contextlib.contextmanager
def running_prometheus(folder: Path, target: str, token: str, pending: str, every: str = "1s") -> Iterator[Prometheus]:
    """Start one that scrapes ``target`` (host:port) with the token; it is ended by the id it was started with."""
    folder.mkdir()
    (folder / "token").write_text(token)
    (folder / "alerts.yml").write_text(hurried(pending))
    configuration = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {
                "job_name": "kronoscope",
                "authorization": {"credentials_file": "token"},
                "static_configs": [{"targets": [target]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(configuration))
    log = folder / "prometheus.log"
    command = [
        str(prometheus_binary("prometheus")),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    with (
        hold_port() as port,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port.getsockname()[1]}", trust_env=False, timeout=120, verify=False
        ) as client,
    ):
        command.append(f"--web.listen-address={client.base_url.netloc.decode()}")
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        server = Prometheus(client)
        try:
            until(lambda: _ready(server) or process.poll() is not None, START_SECONDS, log.read_text)
            assert process.poll() is None, log.read_text()
            yield server
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()


def _ready(server: Prometheus) -> bool:
    with contextlib.suppress(httpx.TransportError, AssertionError):
        return server.scrapes()
    return False
