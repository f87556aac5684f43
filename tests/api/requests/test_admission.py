"""Sound documents that this service does not take: the caller hears which field, and what to do."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from api.requests.admission import admit
from api.settings import Settings
from jobs.codec import parse_document
from jobs.errors import DocumentRefused
from jobs.records import LOCAL_TENANT
from jobs.settings import LedgerSettings
from jobs.tenancy.api_keys import create_key, verify_key
from tests.api import seeding

FACTORY = "package.models:build"


def settings(tmp_path: Path, **more: Any) -> Settings:
    ledger = LedgerSettings(database_url=f"sqlite:///{tmp_path}/l.db", artifact_root=tmp_path)
    return Settings(ledger=ledger, embedded=True, model_store=tmp_path / "models", **more)


def refused(engine: Engine, chosen: Settings, document: dict[str, Any], tenant: str = LOCAL_TENANT) -> dict[str, str]:
    try:
        admit(parse_document(seeding.raw(document)), chosen, engine, tenant)
    except DocumentRefused as error:
        return {each.pointer: each.code for each in error.complaints}
    return {}


@pytest.mark.parametrize(
    ("part", "source", "pointer", "code"),
    [
        ("model", {"source": "factory", "factory": FACTORY}, "/model/factory", "not_allowed"),
        ("data", {"source": "factory", "factory": FACTORY}, "/data/factory", "not_allowed"),
        ("model", {"source": "directory", "path": "/etc"}, "/model/path", "not_allowed"),
        ("data", {"source": "file", "path": "/etc/passwd"}, "/data/path", "not_allowed"),
        ("model", {"source": "upload", "id": "x"}, "/model/id", "not_found"),
        ("data", {"source": "upload", "id": "x"}, "/data/id", "not_found"),
        ("model", {"source": "huggingface", "id": "a/b"}, "/model/id", "not_in_store"),
        ("model", {"source": "huggingface", "id": "../../etc"}, "/model/id", "invalid_value"),
        ("model", {"source": "huggingface", "id": "a/b", "revision": "../x"}, "/model/revision", "invalid_value"),
        ("model", {"source": "directory", "path": "/m", "adapter": "a/b"}, "/model/adapter", "not_in_store"),
        ("model", {"source": "directory", "path": "/m", "adapter": "a/../b"}, "/model/adapter", "invalid_value"),
        ("model", {"source": "directory", "path": "/m", "adapter": "/etc"}, "/model/adapter", "not_allowed"),
        ("model", {"source": "directory", "path": "/m", "adapter": "../x"}, "/model/adapter", "not_allowed"),
        (
            "model",
            {"source": "directory", "path": "/m", "adapter": "a/b", "adapter_revision": "../x"},
            "/model/adapter_revision",
            "invalid_value",
        ),
        ("data", {"source": "huggingface", "id": "a/b"}, "/data/id", "not_in_store"),
        ("data", {"source": "huggingface", "id": "/etc"}, "/data/id", "not_allowed"),
        ("data", {"source": "huggingface", "id": "../data"}, "/data/id", "not_allowed"),
    ],
)
def test_sources_that_nobody_listed(
    ledger: Engine, tmp_path: Path, part: str, source: dict[str, str], pointer: str, code: str
) -> None:
    # of a model with an adapter, the model itself is listed
    chosen = settings(tmp_path, allowed_directories=("/m",) if "adapter" in source else ())
    assert refused(ledger, chosen, {**seeding.DOCUMENT, part: source}) == {pointer: code}


def test_a_relative_path_is_said_to_be_relative(
    ledger: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = settings(tmp_path, allowed_directories=(str(tmp_path),))
    wanted = parse_document(seeding.raw({**seeding.DOCUMENT, "model": {"source": "directory", "path": "inside"}}))
    with pytest.raises(DocumentRefused) as refusal:
        admit(wanted, chosen, ledger, LOCAL_TENANT)
    (complaint,) = refusal.value.complaints
    assert (complaint.pointer, complaint.code) == ("/model/path", "not_allowed")
    assert "must be an absolute path" in complaint.message
    assert "outside" not in complaint.message


def test_what_the_operator_lists_is_taken(ledger: Engine, tmp_path: Path) -> None:
    inside, outside = tmp_path / "listed", tmp_path / "other"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    chosen = settings(tmp_path, allowed_factories=(FACTORY,), allowed_directories=(str(inside),))

    def taken(source: dict[str, str]) -> bool:
        return not refused(ledger, chosen, {**seeding.DOCUMENT, "model": source})

    assert taken({"source": "factory", "factory": FACTORY})
    assert not taken({"source": "factory", "factory": FACTORY + "2"})
    assert taken({"source": "directory", "path": str(inside / "model")})
    assert not taken({"source": "directory", "path": str(inside / ".." / "other")})
    assert not taken({"source": "directory", "path": str(inside / "link" / "model")})
    assert not taken({"source": "directory", "path": "model"})


def test_what_is_listed_for_one_tenant_is_refused_to_others(ledger: Engine, tmp_path: Path) -> None:
    other = _other_tenant(ledger)
    for name in ("shared", "a=b", "theirs"):
        (tmp_path / name).mkdir()
    chosen = settings(
        tmp_path,
        allowed_factories=(FACTORY, f"{other}={FACTORY}2"),
        allowed_directories=(f"{tmp_path}/shared", f"{tmp_path}/a=b", f"{other}={tmp_path}/theirs"),
    )

    def taken(tenant: str, source: dict[str, str]) -> bool:
        return not refused(ledger, chosen, {**seeding.DOCUMENT, "model": source}, tenant)

    for tenant in (LOCAL_TENANT, other):
        assert taken(tenant, {"source": "factory", "factory": FACTORY})
        assert taken(tenant, {"source": "directory", "path": f"{tmp_path}/shared/m"})
        assert taken(tenant, {"source": "directory", "path": f"{tmp_path}/a=b/m"})
        for own in (
            {"source": "factory", "factory": FACTORY + "2"},
            {"source": "directory", "path": f"{tmp_path}/theirs"},
        ):
            assert taken(tenant, own) == (tenant == other)
    assert chosen.factories_of_any() == (FACTORY, FACTORY + "2")
    assert chosen.directories_of(other)[-1] == f"{tmp_path}/theirs"


def test_a_model_in_the_store_needs_no_hub(ledger: Engine, tmp_path: Path) -> None:
    (tmp_path / "models" / "hub" / "models--owner--name").mkdir(parents=True)
    (tmp_path / "models" / "hub" / "models--owner--tuned").mkdir(parents=True)
    (tmp_path / "models" / "datasets" / "owner___name").mkdir(parents=True)
    document = {
        **seeding.DOCUMENT,
        "model": {"source": "huggingface", "id": "owner/name", "adapter": "owner/tuned"},
        "data": {"source": "huggingface", "id": "owner/name"},
    }
    assert refused(ledger, settings(tmp_path), document) == {}


def analysed(reference: dict[str, str]) -> dict[str, Any]:
    return {"kind": "capacity", "factors": reference}


def compared(reference: dict[str, str]) -> dict[str, Any]:
    collected = {name: value for name, value in seeding.DOCUMENT.items() if name in ("model", "data", "task")}
    return {**collected, "kind": "compare_curvature", "compare_curvature": {"against": reference}}


@pytest.mark.parametrize(("document", "field"), [(analysed, "/factors"), (compared, "/compare_curvature/against")])
def test_factors_of_an_earlier_job(ledger: Engine, tmp_path: Path, document: Any, field: str) -> None:
    chosen = settings(tmp_path)

    assert refused(ledger, chosen, document({"path": "/tmp/x"})) == {f"{field}/path": "not_allowed"}
    listed = settings(tmp_path, allowed_directories=(str(tmp_path),))
    assert refused(ledger, listed, document({"path": f"{tmp_path}/m.safetensors"})) == {}
    assert refused(ledger, listed, document({"path": f"{tmp_path}/../m.safetensors"})) == {
        f"{field}/path": "not_allowed"
    }
    assert refused(ledger, chosen, document({"job": "nonsense"})) == {f"{field}/job": "not_found"}
    foreign = seeding.running(ledger, _other_tenant(ledger)).job_id
    assert refused(ledger, chosen, document({"job": foreign})) == {f"{field}/job": "not_found"}
    claim = seeding.running(ledger, LOCAL_TENANT)
    assert refused(ledger, chosen, document({"job": claim.job_id})) == {f"{field}/job": "not_succeeded"}
    without = seeding.finished(ledger, tmp_path, LOCAL_TENANT)
    assert refused(ledger, chosen, document({"job": without})) == {f"{field}/job": "no_factors"}
    kept = seeding.finished(ledger, tmp_path, LOCAL_TENANT, with_factors=True)
    assert refused(ledger, chosen, document({"job": kept})) == {}


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ({"source": "factory", "factory": FACTORY}, "not_allowed"),
        ({"source": "directory", "path": "/etc"}, "not_allowed"),
        ({"source": "upload", "id": "x"}, "not_found"),
        ({"source": "huggingface", "id": "a/b"}, "not_in_store"),
        ({"source": "builtin", "name": "digits_cnn"}, None),
    ],
)
def test_the_model_of_an_extended_job_is_one_that_this_service_takes(
    ledger: Engine, tmp_path: Path, source: dict[str, str], code: str | None
) -> None:
    """It was when that job came; the data that this one does not read again need not be."""
    file = {"source": "file", "path": "/etc/passwd"}
    earlier = {**seeding.DOCUMENT, "model": source, "data": file}
    first = seeding.finished(ledger, tmp_path, LOCAL_TENANT, earlier, with_factors=True)
    data = {"source": "builtin", "name": "digits"}
    document = {"kind": "factors", "extends": {"job": first}, "data": data}
    assert refused(ledger, settings(tmp_path), document) == ({} if code is None else {"/extends/job": code})
    document["data"] = file
    expected = {"/data/path": "not_allowed"} | ({} if code is None else {"/extends/job": code})
    assert refused(ledger, settings(tmp_path), document) == expected


def test_both_sets_of_a_comparison_are_looked_at(ledger: Engine, tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    kept = seeding.finished(ledger, tmp_path, LOCAL_TENANT, with_factors=True)
    foreign = seeding.finished(ledger, tmp_path, _other_tenant(ledger), with_factors=True)
    document = {"kind": "compare_curvature", "factors": {"job": kept}, "compare_curvature": {"against": {"job": kept}}}
    assert refused(ledger, chosen, document) == {}
    document |= {"factors": {"job": foreign}, "compare_curvature": {"against": {"path": "/tmp/x"}}}
    assert refused(ledger, chosen, document) == {
        "/factors/job": "not_found",
        "/compare_curvature/against/path": "not_allowed",
    }
    # options of an analysis that is not asked for name nothing
    document |= {"kind": "capacity", "factors": {"job": kept}}
    assert refused(ledger, chosen, document) == {}


def _other_tenant(engine: Engine) -> str:
    secret = "a secret of this test alone"
    caller = verify_key(engine, secret, create_key(engine, secret, "theirs"))
    assert caller is not None
    return caller.tenant_id


def test_queries_are_of_a_source_that_the_operator_lists(ledger: Engine, tmp_path: Path) -> None:
    listed = settings(tmp_path, allowed_directories=(str(tmp_path),))

    def given(query: dict[str, Any]) -> dict[str, Any]:
        return {**seeding.DOCUMENT, "kind": "influence", "influence": {"query": query}}

    assert refused(ledger, listed, given({"source": "builtin", "name": "digits"})) == {}
    assert refused(ledger, listed, given({"source": "file", "path": f"{tmp_path}/q.jsonl"})) == {}
    for path in (f"{tmp_path}/../q.jsonl", "q.jsonl", "/etc/passwd.txt"):
        found = refused(ledger, listed, given({"source": "file", "path": path}))
        assert found == {"/influence/query/path": "not_allowed"}
    factory = {"source": "factory", "factory": "os:listdir"}
    assert refused(ledger, listed, given(factory)) == {"/influence/query/factory": "not_allowed"}
    hub = {"source": "huggingface", "id": "someone/data"}
    assert refused(ledger, listed, given(hub)) == {"/influence/query/id": "not_in_store"}


def test_a_gradient_lies_in_a_folder_that_the_operator_lists(ledger: Engine, tmp_path: Path) -> None:
    listed = settings(tmp_path, allowed_directories=(str(tmp_path),))

    def given(path: str) -> dict[str, Any]:
        return {**seeding.DOCUMENT, "kind": "natural_gradient", "natural_gradient": {"gradient": {"path": path}}}

    pointer = "/natural_gradient/gradient/path"
    assert refused(ledger, listed, given(f"{tmp_path}/gradient.safetensors")) == {}
    for path in (f"{tmp_path}/../gradient.safetensors", "gradient.safetensors", "/etc/passwd"):
        assert refused(ledger, listed, given(path)) == {pointer: "not_allowed"}
    # options of an analysis that is not asked for open nothing
    assert refused(ledger, listed, given("/etc/passwd") | {"kind": "capacity"}) == {}
