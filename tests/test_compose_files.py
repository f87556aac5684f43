"""The compose files beside the first one: as tight as it is, and naming only settings that something reads."""

import re
import subprocess
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from api.settings import Settings
from jobs.environment import variables_of
from jobs.s3_settings import S3Settings
from jobs.settings import LedgerSettings, RoleSettings, WebhookSettings
from worker.lifetime import LifetimeSettings
from worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[1]
FIRST, NODE, JOIN, METRICS = (ROOT / f"docker-compose{part}.yml" for part in ("", ".node", ".join", ".metrics"))
WHAT_CONFIGURES = (
    *sorted(ROOT.glob("docker-compose*.yml")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples/slurm/worker.sbatch",
    ROOT / ".env.example",
    ROOT / "Dockerfile",
    ROOT / "README.md",
)
# where a node's worker differs, and has to
ITS_OWN = {"environment", "volumes", "networks", "depends_on", "deploy"}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(path.read_text())
    return found


def test_what_another_file_has_another_default_for_is_left_to_them() -> None:
    """What `make env` writes would else stand in its way."""
    defaults: dict[str, set[str]] = {}
    for path in ROOT.glob("docker-compose*.yml"):
        for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", path.read_text()):
            defaults.setdefault(name, set()).add(default)
    lines = (ROOT / ".env.example").read_text().splitlines()
    written = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    several = {name for name, values in defaults.items() if len(values) > 1}
    assert several == {"WORKER_PIDS"}
    assert {name: written.get(name, "") for name in several} == dict.fromkeys(several, "")


def test_a_nodes_worker_is_confined_as_the_first_machines() -> None:
    first, node = read(FIRST)["services"]["worker"], read(NODE)["services"]["worker"]
    assert {name: value for name, value in node.items() if name not in ITS_OWN} == {
        name: value for name, value in first.items() if name not in ITS_OWN
    }
    assert node["read_only"]
    assert node["cap_drop"] == ["ALL"]
    assert node["security_opt"] == ["no-new-privileges:true"]
    # what it takes to start jobs as a user of their own, and to end them
    assert node["cap_add"] == ["KILL", "SETGID", "SETUID"]
    assert node["entrypoint"][:3] == ["setpriv", "--reuid=10001", "--regid=10001"]
    assert node["environment"]["KRONOSCOPE_CHILD_USER"] == "20000"
    assert node.keys().isdisjoint({"ports", "privileged", "network_mode", "pid", "ipc"})


def test_only_the_migration_logs_in_as_a_superuser() -> None:
    services = read(FIRST)["services"]
    holders = {name for name, each in services.items() if "POSTGRES_PASSWORD" in str(each.get("environment"))}
    assert holders == {"postgres"}
    logins = {
        name: each["environment"]["KRONOSCOPE_DATABASE_URL_FILE"]
        for name, each in services.items()
        if "KRONOSCOPE_DATABASE_URL_FILE" in each.get("environment", {})
    }
    assert logins == {name: f"/run/secrets/{name}_database_url" for name in ("migrate", "api", "worker", "webhooks")}


def test_only_the_proxy_is_published_and_the_api_believes_its_address_alone() -> None:
    composed = read(FIRST)
    services, proxied = composed["services"], composed["networks"]["proxied"]
    assert {name for name, each in services.items() if "ports" in each} == {"proxy"}
    assert {name for name, each in services.items() if "front" in each["networks"]} == {"proxy"}
    assert {name for name, each in services.items() if "proxied" in each["networks"]} == {"proxy", "api"}
    assert proxied["internal"]
    address = services["proxy"]["networks"]["proxied"]["ipv4_address"]
    assert services["api"]["environment"]["KRONOSCOPE_TRUSTED_PROXIES"] == address
    (pool,) = proxied["ipam"]["config"]
    # nothing else is given it, also not a command that runs beside the API in a container of its own
    assert ip_address(address) in ip_network(pool["subnet"])
    assert ip_address(address) not in ip_network(pool["ip_range"])
    assert "ipv4_address" not in str(services["api"]["networks"])
    configuration = (ROOT / "ops/nginx/nginx.conf").read_text()
    assert "set $api http://api:8000;" in configuration
    # callers on the machine itself are those of both networks' gateway, whom the proxy does not count
    assert configuration.count(f'{composed["networks"]["front"]["ipam"]["config"][0]["gateway"]} "";') == 2
    assert services["proxy"].keys().isdisjoint({"privileged", "cap_add", "network_mode", "pid", "ipc", "secrets"})


def test_only_the_sender_of_webhooks_is_both_beside_the_database_and_outside() -> None:
    composed = read(FIRST)
    joined = {name: set(each["networks"]) for name, each in composed["services"].items()}
    assert {name for name, networks in joined.items() if "egress" in networks} == {"webhooks", "fetch"}
    assert joined["fetch"] == {"egress"}
    sender = composed["services"]["webhooks"]
    assert sender["secrets"] == ["webhooks_database_url", "webhook_key"]
    assert sender.keys().isdisjoint({"ports", "privileged", "cap_add", "network_mode", "pid", "ipc", "volumes", "user"})
    assert (sender["read_only"], sender["cap_drop"]) == (True, ["ALL"])
    assert (sender["mem_limit"], sender["pids_limit"]) == ("512m", 512)


def test_a_container_has_the_secrets_that_it_reads_and_no_job_can_open_them() -> None:
    for path in (FIRST, NODE):
        composed = read(path)
        for name, service in composed["services"].items():
            named = [str(value) for value in service.get("environment", {}).values()]
            files = {value.removeprefix("/run/secrets/") for value in named if value.startswith("/run/secrets/")}
            if name != "redis":
                assert set(service.get("secrets", [])) == files, name
            if files:
                assert "/run/secrets:size=64k,mode=0700,uid=10001,gid=10001" in service["tmpfs"], name
        assert composed["secrets"] == {
            name: {"file": f"${{SECRETS_FOLDER:-.secrets}}/{name}"} for name in composed["secrets"]
        }


def test_make_env_writes_the_files_that_compose_names(tmp_path: Path) -> None:
    def make(folder: Path) -> dict[str, str]:
        subprocess.run(["make", "env"], cwd=folder, check=True, capture_output=True, timeout=60)
        assert oct((folder / ".secrets").stat().st_mode)[-3:] == "700"
        return {path.name: path.read_text() for path in (folder / ".secrets").iterdir()}

    for name in ("Makefile", ".env.example"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    files = make(tmp_path)
    settings = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines() if "=" in line)
    assert set(files) == set(read(FIRST)["secrets"])
    assert files["redis_password"] == settings["REDIS_PASSWORD"]
    assert files["redis_url"] == f"redis://kronoscope:{settings['REDIS_PASSWORD']}@redis:6379/0"
    assert f"://kronoscope_api:{settings['API_PASSWORD']}@postgres:5432/" in files["api_database_url"]
    assert make(tmp_path) == files
    (tmp_path / ".env").write_text(
        "DATABASE_URL='postgresql://x:y@10.0.0.1/kronoscope'\nREDIS_URL=redis://10.0.0.1/0\n"
    )
    files |= {"worker_database_url": "postgresql://x:y@10.0.0.1/kronoscope", "redis_url": "redis://10.0.0.1/0"}
    assert make(tmp_path) == files


def test_make_env_adds_what_an_earlier_version_s_file_lacks(tmp_path: Path) -> None:
    for name in ("Makefile", ".env.example"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / ".env").write_text("POSTGRES_PASSWORD=old")
    for _ in range(2):
        subprocess.run(["make", "env"], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    lines = (tmp_path / ".env").read_text().splitlines()
    assert lines[0] == "POSTGRES_PASSWORD=old"
    names = [line.partition("=")[0] for line in lines]
    assert len(names) == len(set(names))
    assert {"MIGRATE_PASSWORD", "API_PASSWORD", "WORKER_PASSWORD", "WEBHOOKS_PASSWORD", "REDIS_PASSWORD"} <= set(names)
    assert all(len(line.partition("=")[2]) == 48 for line in lines[1:])


def test_a_node_is_told_what_the_first_machines_worker_is_told_and_nothing_more() -> None:
    first, node = (set(read(path)["services"]["worker"]["environment"]) for path in (FIRST, NODE))
    assert node == first
    assert not any("SECRET" in name for name in node)


def test_every_machine_has_the_same_artifacts_and_nodes_cannot_write_the_hubs_models() -> None:
    def mounts(path: Path, service: str) -> dict[str, dict[str, Any]]:
        volumes = read(path)["services"][service]["volumes"]
        return {each["target"]: each for each in volumes if isinstance(each, dict)}

    def source(mount: dict[str, Any]) -> str:
        return re.sub(r":\?[^}]*", "", str(mount["source"]))

    shared = [mounts(NODE, "worker"), mounts(JOIN, "worker"), mounts(JOIN, "api")]
    assert {source(each["/data/artifacts"]) for each in shared} == {"${SHARED_FOLDER}/artifacts"}
    # one that is not mounted must not be made on the spot, empty
    assert all(each["bind"] == {"create_host_path": False} for found in shared for each in found.values())
    assert source(mounts(NODE, "worker")["/data/models/hub"]) == source(mounts(JOIN, "fetch")["/data/models"]) + "/hub"
    assert mounts(NODE, "worker")["/data/models/hub"]["read_only"]
    assert mounts(JOIN, "api")["/data/models"]["read_only"]


def test_the_first_machine_opens_its_servers_on_a_named_address_only() -> None:
    ports = {name: service["ports"] for name, service in read(JOIN)["services"].items() if "ports" in service}
    assert set(ports) == {"postgres", "redis"}
    assert all(re.match(r"\$\{PRIVATE_ADDRESS(:\?[^}]*)?\}:\d+:\d+$", port) for (port,) in ports.values())


def test_prometheus_is_confined_and_gets_the_token_where_it_looks_for_it() -> None:
    first, laid_over = read(FIRST), read(METRICS)
    service = laid_over["services"]["prometheus"]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["networks"] == ["backend"]
    assert first["networks"]["backend"]["internal"]
    assert service.keys().isdisjoint({"ports", "privileged", "cap_add", "network_mode", "pid", "ipc"})
    (secret,) = service["secrets"]
    assert laid_over["secrets"][secret] == {"file": "${SECRETS_FOLDER:-.secrets}/metrics_token"}
    (scraped,) = read(ROOT / "ops/prometheus.yml")["scrape_configs"]
    assert scraped["authorization"] == {"credentials_file": f"/run/secrets/{secret}"}
    assert scraped["static_configs"] == [{"targets": ["api:8000"]}]
    assert "api" in first["services"]


@pytest.mark.parametrize("path", WHAT_CONFIGURES, ids=lambda path: path.name)
def test_every_setting_that_is_named_is_read(path: Path) -> None:
    code = "".join(
        file.read_text()
        for room in ("api", "catalog", "jobs", "kronoscope", "worker", "tests/chaos", "tests/engine")
        for file in sorted((ROOT / room).rglob("*.py"))
    )
    known = set(re.findall(r"KRONOSCOPE_[A-Z]+(?:_[A-Z]+)*", code))
    models = (LedgerSettings, RoleSettings, WebhookSettings, S3Settings, Settings, WorkerSettings, LifetimeSettings)
    known |= {
        each
        for model in models
        for name, field in model.model_fields.items()
        for each in variables_of(name, field).names
    }
    # what Compose itself puts in: where the proxy is published
    known |= set(re.findall(r"\$\{(KRONOSCOPE_[A-Z_]+)", FIRST.read_text()))
    named = {each.removesuffix("_FILE") for each in re.findall(r"KRONOSCOPE_[A-Z]+(?:_[A-Z]+)*", path.read_text())}
    assert named - known == set()
