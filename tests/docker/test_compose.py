"""The service in containers: what runs, as whom, reachable how, and that jobs outlive the containers."""

import json
import os
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from tests.docker.stack import ROOT, Stack, digests, ended, run, submit, until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

LONG = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "tiny_gpt"},
    "data": {"source": "synthetic", "shape": [64], "examples": 3000, "vocabulary": 256},
    "task": {"type": "causal_lm"},
    "collection": {"batch_size": 8},
}
"""About 40 seconds of a processor's time: long enough to be killed in the middle."""


@pytest.mark.parametrize(
    "files",
    [
        ["docker-compose.yml"],
        ["docker-compose.yml", "docker-compose.gpu.yml"],
        ["docker-compose.yml", "docker-compose.join.yml"],
        ["docker-compose.yml", "docker-compose.tls.yml"],
        ["docker-compose.node.yml"],
    ],
    ids=" and ".join,
)
def test_the_compose_files_are_sound(files: list[str]) -> None:
    joining = {
        "DATABASE_URL": "postgresql://kronoscope:change-me@10.0.0.1:5432/kronoscope",
        "REDIS_URL": "redis://kronoscope:change-me@10.0.0.1:6379/0",
        "PRIVATE_ADDRESS": "10.0.0.1",
        "SHARED_FOLDER": "/mnt/kronoscope",
        "TLS_CERTIFICATE": "/etc/tls/certificate.pem",
        "TLS_KEY": "/etc/tls/key.pem",
    }
    words = [word for name in files for word in ("--file", str(ROOT / name))]
    done = subprocess.run(
        ["docker", "compose", "--env-file", str(ROOT / ".env.example"), *words, "config", "--quiet"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | joining,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_but_the_proxy_is_published(stack: Stack) -> None:
    published = {
        stack.inspect(container)["Config"]["Labels"]["com.docker.compose.service"]: bindings
        for container in stack.containers()
        if (bindings := {port: at for port, at in stack.inspect(container)["NetworkSettings"]["Ports"].items() if at})
    }
    assert published == {"proxy": {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(stack.port)}]}}


def test_every_container_is_hardened(stack: Stack) -> None:
    for container in stack.containers():
        facts = stack.inspect(container)
        host, service = facts["HostConfig"], facts["Config"]["Labels"]["com.docker.compose.service"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert host["SecurityOpt"] == ["no-new-privileges:true"], service
        assert not host["Privileged"], service
        assert host["Memory"] > 0, service
        assert host["PidsLimit"] > 0, service
        added = {each.removeprefix("CAP_") for each in host["CapAdd"] or ()}
        if service == "worker":
            assert added == {"KILL", "SETGID", "SETUID"}
        elif service != "postgres":
            assert not added, service


def test_no_process_of_the_service_is_root(stack: Stack) -> None:
    for service in ("api", "worker", "webhooks", "postgres", "redis"):
        for container in stack.containers(service):
            users = until(lambda: users_without_root(container), 30, f"nothing in {service} is root's")  # noqa: B023
            if service in ("api", "webhooks"):
                assert users == {"10001"}
            elif service == "worker":
                assert all(each == "10001" or 20_000 <= int(each) < 60_000 for each in users)


def users_without_root(container: str) -> set[str]:
    """The users of a container's processes; none where one is root's, as a health check is for a moment."""
    # the first line is the heading; Docker's own init is all that may keep the entry point's user
    listed = run("docker", "top", container, "-o", "pid,uid,args").splitlines()[1:]
    processes = [line.split(None, 2) for line in listed]
    users = {uid for _, uid, command in processes if not command.startswith("/sbin/docker-init")}
    return set() if "0" in users else users


def test_the_root_cannot_be_written_and_the_data_can(stack: Stack) -> None:
    refused = "! touch /app/x 2>/dev/null && ! touch /opt/x 2>/dev/null"
    attempt = f"{refused} && touch /data/artifacts/x && rm /data/artifacts/x && echo fine"
    for service in ("api", "worker"):
        assert stack.compose("exec", "--no-TTY", "--user", "10001", service, "sh", "-c", attempt) == "fine\n"


def test_a_job_runs_as_a_user_without_capabilities_behind_every_wall(stack: Stack, client: httpx.Client) -> None:
    isolation = client.get("/readyz").raise_for_status().json()["isolation"]
    walls = {"own_user", "neighbours", "files", "memory", "secret_files", "no_new_privileges", "system_calls"}
    assert set(isolation["jobs"].split(", ")) == walls
    assert isolation["tenants"] == "row_level_security"
    job_id = submit(client, LONG)
    look = (
        "for p in /proc/[0-9]*; do "
        "tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -q '^[^ ]*python[^ ]* -P -m worker.execution --' || continue; "
        "grep -E '^(Uid|Gid|CapPrm|CapEff|CapAmb|NoNewPrivs|Seccomp):' $p/status; "
        "grep -E 'core file|open files|processes' $p/limits; done"
    )

    def seen() -> str | None:
        told = "".join(run("docker", "exec", each, "sh", "-c", look) for each in stack.containers("worker"))
        return told or None

    told = until(seen, 120, "the job's process runs")
    facts = {line.split()[0]: line.split()[1:] for line in told.splitlines() if ":" in line}
    (user,) = set(facts["Uid:"])
    assert 20_000 <= int(user) < 60_000
    assert facts["Gid:"] == facts["Uid:"]
    assert {facts[each][0] for each in ("CapPrm:", "CapEff:", "CapAmb:")} == {"0" * 16}
    assert (facts["NoNewPrivs:"], facts["Seccomp:"]) == (["1"], ["2"])
    limits = [line.split() for line in told.splitlines() if line.startswith("Max")]
    assert {" ".join(line[1:3]): line[-3:-1] if line[-1].isalpha() else line[-2:] for line in limits} == {
        "core file": ["0", "0"],
        "open files": ["4096", "4096"],
        "processes 448": ["448", "448"],  # of the 512 that the container may have
    }
    client.post(f"/v1/jobs/{job_id}:cancel").raise_for_status()
    assert ended(client, job_id)["state"] == "cancelled"  # so its guardian can end it


def test_secrets_are_files_that_only_the_service_may_read(stack: Stack) -> None:
    for container in stack.containers():
        facts = stack.inspect(container)
        service = facts["Config"]["Labels"]["com.docker.compose.service"]
        held = {name for name, value in stack.passwords.items() if value in json.dumps(facts)}
        # PostgreSQL's own, of its first start; the server is the one thing that it opens
        assert held == ({"POSTGRES_PASSWORD"} if service == "postgres" else set()), service
    for service in ("api", "worker"):
        look = "cat /run/secrets/redis_url >/dev/null && echo read"
        assert stack.compose("exec", "--no-TTY", "--user", "10001:10001", service, "sh", "-c", look) == "read\n"
        look = "cat /run/secrets/redis_url 2>/dev/null || echo refused"
        assert stack.compose("exec", "--no-TTY", "--user", "20001:10001", service, "sh", "-c", look) == "refused\n"
        seen = stack.compose("exec", "--no-TTY", "--user", "10001:10001", service, "ls", "/run/secrets").split()
        wanted = {
            "api": {"api_database_url", "key_secret", "webhook_key", "metrics_token"},
            "worker": {"worker_database_url"},
        }
        assert set(seen) == wanted[service] | {"redis_url"}


def test_the_roles_that_log_in_own_no_table(stack: Stack) -> None:
    owners = "SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'public'"
    assert stack.sql(owners) == ["kronoscope_owner"]
    logged_in = stack.sql("SELECT DISTINCT usename FROM pg_stat_activity WHERE application_name = '' AND usename <> ''")
    assert {"kronoscope_api", "kronoscope_worker", "kronoscope_webhooks"} <= set(logged_in)


def test_torch_is_in_the_worker_alone(stack: Stack) -> None:
    look = (
        "from importlib.util import find_spec; print([n for n in ('torch', 'engine', 'worker', 'api') if find_spec(n)])"
    )
    assert stack.compose("exec", "--no-TTY", "api", "python", "-P", "-c", look) == "['api']\n"
    assert stack.compose("exec", "--no-TTY", "worker", "python", "-P", "-c", look) == "['torch', 'engine', 'worker']\n"


@pytest.mark.parametrize(("service", "packages"), [("api", "api jobs migrations"), ("worker", "engine jobs worker")])
def test_every_module_finds_what_it_imports(stack: Stack, service: str, packages: str) -> None:
    # an image holds its own extras only: here a dependency shows that pyproject.toml does not list
    look = (
        "import importlib, pkgutil, sys\n"
        "for package in sys.argv[1:]:\n"
        "    module = importlib.import_module(package)\n"
        "    for found in pkgutil.walk_packages(module.__path__, f'{package}.'):\n"
        "        if not found.name.startswith('migrations.'):\n"
        "            importlib.import_module(found.name)\n"
        "print('all')"
    )
    inside = ("exec", "--no-TTY", "--user", "10001:10001", service)  # who may read the secrets
    done = stack.compose(*inside, "python", "-P", "-c", look, *packages.split())
    assert done == "all\n"


def test_no_container_of_the_service_but_the_webhooks_sender_has_a_way_out(stack: Stack) -> None:
    def network(name: str) -> dict[str, Any]:
        (found,) = json.loads(run("docker", "network", "inspect", f"{stack.project}_{name}"))
        return dict(found)

    assert network("backend")["Internal"] is network("proxied")["Internal"] is True
    assert network("front")["Options"]["com.docker.network.bridge.enable_ip_masquerade"] == "false"
    for container in stack.containers():
        facts = stack.inspect(container)
        joined = {name.removeprefix(f"{stack.project}_") for name in facts["NetworkSettings"]["Networks"]}
        service = facts["Config"]["Labels"]["com.docker.compose.service"]
        more = {"api": {"backend", "proxied"}, "proxy": {"proxied", "front"}, "webhooks": {"backend", "egress"}}
        assert joined == more.get(service, {"backend"}), service


@pytest.mark.parametrize(
    "command", ["EVAL 1 0", "SCRIPT LOAD 1", "EVALSHA 1 0", "CONFIG GET maxmemory", "FLUSHALL", "MODULE LIST"]
)
def test_redis_refuses_what_a_queue_does_not_need(stack: Stack, command: str) -> None:
    shell = f"REDISCLI_AUTH=$(cat /run/secrets/redis_password) redis-cli --user kronoscope {command}"
    assert stack.compose("exec", "--no-TTY", "redis", "sh", "-c", shell).startswith("NOPERM")


def test_redis_answers_nobody_without_the_password(stack: Stack) -> None:
    assert stack.compose("exec", "--no-TTY", "redis", "redis-cli", "ping").startswith("NOAUTH")


def test_a_key_is_needed(stack: Stack) -> None:
    answer = httpx.get(f"http://127.0.0.1:{stack.port}/v1/jobs", trust_env=False)
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"


def test_two_jobs_run_one_on_each_worker_and_outlive_the_containers(
    stack: Stack, client: httpx.Client, key: str
) -> None:
    jobs = [submit(client), submit(client)]
    owners = until(lambda: holders(stack, jobs), 60, "both jobs run, each on its own worker")
    assert len(set(owners)) == 2
    stack.compose("restart", "api")
    stack.await_healthy()
    for job_id in jobs:
        job = ended(client, job_id)
        assert job["state"] == "succeeded", job["failure"]
    first, second = (digests(client, job_id) for job_id in jobs)
    assert first
    assert first == second
    before = [client.get(f"/v1/jobs/{job_id}/results").raise_for_status().json() for job_id in jobs]
    assert before[0]["artifacts"]

    stack.compose("down", "--timeout", "20", timeout=300)
    stack.up()

    with stack.client(key) as again:
        after = [again.get(f"/v1/jobs/{job_id}/results").raise_for_status().json() for job_id in jobs]
        assert after == before
        for artifact in before[0]["artifacts"]:
            again.get(f"/v1/jobs/{jobs[0]}/artifacts/{artifact['name']}").raise_for_status()


@pytest.mark.timeout(1500)
def test_of_three_workers_one_is_killed_in_mid_job_and_another_ends_it(stack: Stack, client: httpx.Client) -> None:
    stack.compose("up", "--detach", "--no-recreate", "--scale", "worker=3", timeout=300)
    stack.await_healthy(workers=3)
    undisturbed, struck = submit(client, LONG), submit(client, LONG)

    def collecting() -> str | None:
        progress = client.get(f"/v1/jobs/{struck}").raise_for_status().json()["progress"]
        owners = stack.sql(f"SELECT lease_owner FROM jobs WHERE id = '{struck}' AND lease_owner IS NOT NULL")
        return owners[0] if owners and progress and progress["stage"] == "collection" and progress["done"] else None

    owner = until(collecting, 120, "the job is in the middle of its collection")
    (victim,) = [each for each in stack.containers("worker") if each.startswith(owner.partition(":")[0])]
    run("docker", "kill", victim)
    killed_at = time.time()

    def elsewhere() -> bool:
        return bool(stack.sql(f"SELECT 1 FROM jobs WHERE id = '{struck}' AND attempt = 2 AND lease_owner <> '{owner}'"))

    until(elsewhere, 240, "another worker has the job")
    for job_id in (undisturbed, struck):
        job = ended(client, job_id)
        assert job["state"] == "succeeded", job["failure"]
    assert stack.sql(f"SELECT attempt, failures FROM jobs WHERE id = '{struck}'") == ["2|1"]
    assert digests(client, struck) == digests(client, undisturbed)
    (_, again) = stack.sql(
        "SELECT extract(epoch FROM at) FROM job_events "
        f"WHERE job_id = '{struck}' AND type = 'state' AND data ->> 'state' = 'running' ORDER BY seq"
    )
    # what the soak bounds, on a machine that does nothing else
    sys.stdout.write(f"taken again after {float(again) - killed_at:.1f} s\n")
    # a container that was killed by hand is not restarted: the next tests want the two they know
    stack.compose("up", "--detach", "--scale", "worker=2", timeout=300)
    stack.await_healthy()


def holders(stack: Stack, jobs: list[str]) -> list[str] | None:
    """Who holds the jobs, when both are held at once."""
    wanted = ",".join(f"'{job_id}'" for job_id in jobs)
    held = stack.sql(f"SELECT lease_owner FROM jobs WHERE id IN ({wanted}) AND lease_owner IS NOT NULL")
    return held if len(held) == len(jobs) else None


def test_nothing_of_the_passwords_is_in_the_logs(stack: Stack, key: str) -> None:
    logs = stack.compose("logs", "--no-color")
    assert [name for name, value in stack.passwords.items() if value in logs] == []
    assert key not in logs


def test_the_worker_says_first_what_it_computes_on(stack: Stack) -> None:
    container = stack.containers("worker")[0]
    done = subprocess.run(["docker", "logs", container], capture_output=True, text=True, timeout=300, check=True)
    first = (done.stdout + done.stderr).splitlines()[0]
    assert "cpu" in first.lower() or "cuda" in first.lower() or "gpu" in first.lower()
