"""The Kubernetes manifests: rendered by kubectl, valid by the API's own schemas, confined, and asking a real view.

No cluster is at hand, so that they run on one is not shown here.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import psycopg
import pytest
from ruamel.yaml import YAML
from sqlalchemy import make_url, update

from api.settings import Settings
from jobs.autoscale.classes import read_classes
from jobs.autoscale.kubernetes import lent_jobs
from jobs.codec import parse_document
from jobs.environment import variables_of
from jobs.records import LOCAL_TENANT
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, writing
from jobs.schema.tables import jobs
from jobs.settings import LedgerSettings, RoleSettings, ServiceSettings, WebhookSettings
from migrations.__main__ import migrate
from tests.jobs.conftest import BODY
from worker.lifetime import LifetimeSettings
from worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "ops/kubernetes/base"
EXAMPLES = ROOT / "examples/autoscale"
VERSION = "1.37"
GPU = "nvidia.com/gpu"


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """What `kubectl kustomize` makes of the base, by kind and name."""
    return rendered(BASE)


def rendered(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    kubectl = shutil.which("kubectl") or str(Path(sys.executable).with_name("kubectl"))
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    documents = list(YAML(typ="safe", pure=True).load_all(done.stdout))
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def pods(manifests: dict[tuple[str, str], dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for (kind, name), manifest in manifests.items():
        spec = manifest.get("spec", {})
        template = spec.get("jobTargetRef", spec).get("template")
        if template is not None:
            yield f"{kind} {name}", template["spec"]
    job = rendered_job()
    yield "worker-job.yaml", job["spec"]["template"]["spec"]


def rendered_job() -> dict[str, Any]:
    file = read_classes(EXAMPLES / "kubernetes.toml", "kubernetes")
    (only,) = file.classes
    made: dict[str, Any] = YAML(typ="safe", pure=True).load(
        only.script("0192f0c1-7a00-7000-8000-000000000001", file.worker)
    )
    return made


def test_the_base_has_every_part_of_the_service(manifests: Any) -> None:
    assert set(manifests) == {
        ("Namespace", "kronoscope"),
        ("ConfigMap", "kronoscope-settings"),
        ("PersistentVolumeClaim", "kronoscope-artifacts"),
        ("PersistentVolumeClaim", "kronoscope-models"),
        ("Job", "kronoscope-migrate"),
        ("Deployment", "kronoscope-api"),
        ("Service", "kronoscope-api"),
        ("Deployment", "kronoscope-worker"),
        ("ScaledJob", "kronoscope-worker-79gib"),
        ("TriggerAuthentication", "kronoscope-scaler"),
    }
    assert {each["metadata"].get("namespace", "kronoscope") for each in manifests.values()} == {"kronoscope"}


def test_built_in_kinds_are_valid_by_kubernetes_own_schemas(manifests: Any) -> None:
    scaled = manifests["ScaledJob", "kronoscope-worker-79gib"]
    as_job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "one-of-its-jobs", "labels": scaled["metadata"]["labels"]},
        "spec": scaled["spec"]["jobTargetRef"],
    }
    built_in = [each for each in manifests.values() if not each["apiVersion"].startswith("keda.sh/")]
    for each in [*built_in, as_job, rendered_job()]:
        kubernetes_validate.validate(each, VERSION, strict=True)
    broken = json.loads(json.dumps(as_job))
    broken["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesystem"] = True  # one level too high
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSION, strict=True)


def test_kedas_kinds_have_the_fields_that_it_documents(manifests: Any) -> None:
    schema = json.loads((ROOT / "ops/kubernetes/scaled-job.schema.json").read_text())
    for each in manifests.values():
        if each["apiVersion"].startswith("keda.sh/"):
            jsonschema.validate(each, schema)
    wrong = json.loads(json.dumps(manifests["ScaledJob", "kronoscope-worker-79gib"]))
    wrong["spec"]["maxReplicas"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_every_pod_is_confined(manifests: Any) -> None:
    found = dict(pods(manifests))
    assert len(found) == 5
    for name, pod in found.items():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] == 10001, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), name
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert "memory" in container["resources"]["limits"], name
        assert (GPU in container["resources"]["limits"]) == ("worker" in name), name
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["volumes"]}, name
        assert not [each for each in container.get("env", []) if re.search("PASSWORD$|URL$|SECRET$", each["name"])], (
            name
        )


def test_the_overlay_starts_workers_as_compose_does_and_changes_nothing_else(manifests: Any) -> None:
    overlay = rendered(BASE.parent / "users")
    compose = YAML(typ="safe", pure=True).load((ROOT / "docker-compose.yml").read_text())["services"]["worker"]
    workers = {("Deployment", "kronoscope-worker"), ("ScaledJob", "kronoscope-worker-79gib")}
    assert {each for each in manifests if overlay[each] != manifests[each]} == workers | {("Namespace", "kronoscope")}
    assert set(overlay) == set(manifests)
    for kind, name in workers:
        spec = overlay[kind, name]["spec"]
        pod = spec.get("jobTargetRef", spec)["template"]["spec"]
        before = manifests[kind, name]["spec"]
        base = before.get("jobTargetRef", before)["template"]["spec"]
        (container,), (unchanged,) = pod["containers"], base["containers"]
        assert container["command"] == compose["entrypoint"]
        assert container["args"] == compose["command"]
        assert container["securityContext"] == unchanged["securityContext"] | {
            "capabilities": {"drop": ["ALL"], "add": compose["cap_add"]}
        }
        assert pod["securityContext"] == base["securityContext"] | {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "runAsGroup": 0,
        }
        user = compose["environment"]["KRONOSCOPE_CHILD_USER"]
        assert container["env"] == [*unchanged["env"], {"name": "KRONOSCOPE_CHILD_USER", "value": user}]
        if kind == "Deployment":
            kubernetes_validate.validate(overlay[kind, name], VERSION, strict=True)
        else:
            jsonschema.validate(
                overlay[kind, name], json.loads((ROOT / "ops/kubernetes/scaled-job.schema.json").read_text())
            )


def test_they_set_only_what_something_reads(manifests: Any) -> None:
    models = (
        LedgerSettings,
        RoleSettings,
        WebhookSettings,
        ServiceSettings,
        Settings,
        WorkerSettings,
        LifetimeSettings,
    )
    known = {
        each
        for model in models
        for name, field in model.model_fields.items()
        for each in variables_of(name, field).names
    }
    for name, pod in pods(manifests):
        for variable in pod["containers"][0]["env"]:
            assert variable["name"].removesuffix("_FILE") in known, f"{name}: {variable['name']}"
    settings = manifests["ConfigMap", "kronoscope-settings"]["data"]
    assert set(settings) <= known
    for _, pod in pods(manifests):
        for each in pod["containers"][0].get("envFrom", []):
            assert ("ConfigMap", each["configMapRef"]["name"]) in manifests


def test_a_scaled_worker_ends_by_itself_before_it_is_ended(manifests: Any) -> None:
    spec = manifests["ScaledJob", "kronoscope-worker-79gib"]["spec"]["jobTargetRef"]
    settings = {each["name"]: each.get("value") for each in spec["template"]["spec"]["containers"][0]["env"]}
    environ = {name: value for name, value in settings.items() if value is not None}
    lifetime = LifetimeSettings.from_environment(environ).lifetime(0.0)
    assert lifetime.until_idle
    assert lifetime.seconds is not None
    assert lifetime.seconds < spec["activeDeadlineSeconds"] - 600
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    labels = manifests["ScaledJob", "kronoscope-worker-79gib"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "kronoscope"


def test_the_trigger_counts_the_jobs_that_such_a_worker_could_take(manifests: Any, databases: Any) -> None:
    """Asked by a role that may read the view alone, in a database whose roles are those of the containers."""
    url = databases.empty("postgresql")
    passwords = {f"KRONOSCOPE_{each}_PASSWORD": f"pw-{each}" for each in ("MIGRATE", "API", "WORKER", "WEBHOOKS")}
    migrate(url, RoleSettings.from_environment(passwords))
    engine = open_database(url)
    document = parse_document(json.dumps(BODY).encode())
    rows: list[tuple[int, dict[str, Any]]] = [
        (3, {}),
        (2, {"needs_bytes": 10**9}),
        (1, {"needs_bytes": 10**9, "device_class": "cuda"}),
        (1, {"needs_bytes": 10**9, "device_class": "cpu"}),
        (1, {"needs_bytes": 10**12}),
        (1, {"world_size": 4}),
        (1, {"not_before": ledger_now(3600)}),
        (1, {"deadline_at": ledger_now(-1)}),
        (1, {"state": "running"}),
    ]
    for count, values in rows:
        ids = [submit(engine, LOCAL_TENANT, document).job.id for _ in range(count)]
        with writing(engine) as connection:
            connection.execute(update(jobs).where(jobs.c.id.in_(ids)).values(**({"world_size": 1} | values)))
    engine.dispose()
    plain = make_url(url).set(drivername="postgresql")
    database = plain.database
    role = f"scaler_{database}"[:60]
    with psycopg.connect(plain.render_as_string(hide_password=False), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'pw'")
        connection.execute(f"GRANT SELECT ON waiting_jobs TO {role}")
    query = manifests["ScaledJob", "kronoscope-worker-79gib"]["spec"]["triggers"][0]["metadata"]["query"]
    try:
        for name, password in ((role, "pw"), ("kronoscope_worker", "pw-WORKER")):
            address = plain.set(username=name, password=password).render_as_string(hide_password=False)
            with psycopg.connect(address, autocommit=True) as connection:
                assert connection.execute(query).fetchone() == (6,)
                if name == role:
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        connection.execute("SELECT document FROM jobs")
        address = plain.set(username="kronoscope_api", password="pw-API").render_as_string(hide_password=False)
        with (
            psycopg.connect(address, autocommit=True) as connection,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            connection.execute(query)  # it is over all tenants' rows
    finally:
        with psycopg.connect(plain.render_as_string(hide_password=False), autocommit=True) as connection:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")


def test_jobs_of_the_cluster_are_read_by_their_conditions() -> None:
    """As `batch/v1` documents a Job's status; one that Kueue suspends, or whose pod is not ready, is pending."""
    ids = [f"0192f0c1-7a00-7000-8000-00000000000{number}" for number in range(6)]
    statuses: list[dict[str, Any]] = [
        {"ready": 1, "active": 1},
        {"active": 1, "ready": 0},
        {"conditions": [{"type": "Suspended", "status": "True"}]},
        {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1},
        {"conditions": [{"type": "Failed", "status": "True"}]},
        {"ready": 1},
    ]
    items = [
        {"metadata": {"name": f"kronoscope-{each}"}, "status": status}
        for each, status in zip(ids, statuses, strict=True)
    ]
    items[5]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    items.append({"metadata": {"name": "somebody-elses"}, "status": {"ready": 1}})
    found = lent_jobs(items, dict.fromkeys(ids))
    assert {ids.index(each): lent.stage for each, lent in found.items()} == {
        0: "running", 1: "pending", 2: "pending", 5: "ending",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "launcher"), [("slurm", "slurm"), ("kubernetes", "kubernetes"), ("skypilot", "command")]
)
def test_the_examples_are_read(name: str, launcher: str) -> None:
    for each in read_classes(EXAMPLES / f"{name}.toml", launcher).classes:
        assert "KRONOSCOPE_UNTIL_IDLE=1" in each.script("0192f0c1-7a00-7000-8000-000000000001", "worker")
