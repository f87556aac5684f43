"""Deny by default: every route of the application is walked, mounts too, and asks for a key."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.routing import BaseRoute, Mount

from api.main import create_app
from api.requests.auth import authenticate, is_open, is_scraper_only
from api.settings import Settings
from jobs.settings import LedgerSettings
from jobs.tenancy.api_keys import create_key, revoke_key
from tests.api.conftest import Keyed
from tests.api.expect import problem
from tests.api.server import KEY_SECRET, METRICS_TOKEN
from tests.conftest import Databases

SCRAPED = {"/metrics"}
OPEN = {"/livez", "/readyz", "/", "/docs", "/dashboard/{name:path}"}


def application(tmp_path: Path) -> Sequence[BaseRoute]:
    ledger = LedgerSettings(database_url=f"sqlite:///{tmp_path}/l.db", artifact_root=tmp_path)
    return create_app(Settings(ledger=ledger, key_secret=KEY_SECRET)).routes


def walk(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str, object]]:
    """Path template, method and endpoint of everything that can be reached."""
    for context in iter_route_contexts(routes):
        route = context.original_route
        if isinstance(route, Mount):
            assert route.routes, f"{route.path} mounts an application that cannot be walked"
            yield from walk(route.routes, prefix + route.path)
            continue
        assert isinstance(route, APIRoute), f"{route!r} passes the application's dependencies by"
        for method in sorted(context.methods or ()):
            yield prefix + str(context.path), method, context.endpoint


def test_only_the_listed_routes_are_open(tmp_path: Path) -> None:
    found = list(walk(application(tmp_path)))
    assert len(found) > 15
    assert {path for path, _, endpoint in found if is_open(endpoint)} == OPEN
    assert {path for path, _, endpoint in found if is_scraper_only(endpoint)} == SCRAPED


def test_every_other_route_answers_401_without_a_key(tmp_path: Path, keyed: Keyed) -> None:
    with keyed.server.client() as client:
        for path, method, _ in walk(application(tmp_path)):
            address = re.sub(r"{[^}]*}", "0", path)
            answer = client.request(method, address)
            if path in OPEN:
                # the probe refuses where the database takes a second, which is no matter of keys
                assert answer.status_code in ((200, 503) if path == "/readyz" else (200, 404))
            else:
                problem(answer, 401)
                assert answer.headers["www-authenticate"].startswith("Bearer")


def test_the_operator_s_token_opens_metrics_and_nothing_else(tmp_path: Path, keyed: Keyed) -> None:
    with keyed.server.client(METRICS_TOKEN) as client:
        for path, method, _ in walk(application(tmp_path)):
            if path not in OPEN:
                answer = client.request(method, re.sub(r"{[^}]*}", "0", path))
                assert answer.status_code == (200 if path in SCRAPED else 401), path


def test_no_key_opens_metrics(keyed: Keyed) -> None:
    admin = create_key(keyed.engine, KEY_SECRET, "ours", ("read", "submit", "admin"))
    for shown in (admin, METRICS_TOKEN[:-1], METRICS_TOKEN + "x", "\xff"):
        with keyed.server.client() as client:
            header = {"authorization": f"Bearer {shown}".encode("latin-1")}
            problem(client.get("/metrics", headers=header), 401)


def test_without_a_token_nobody_reads_metrics(databases: Databases, tmp_path: Path) -> None:
    ledger = LedgerSettings(database_url=databases.migrated("sqlite"), artifact_root=tmp_path)
    app = create_app(Settings(ledger=ledger, key_secret=KEY_SECRET))

    async def ask(header: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
            return await client.get("http://api/metrics", headers={"authorization": header})

    for header in ("", "Bearer ", "Bearer None"):
        problem(asyncio.run(ask(header)), 401)


def test_a_route_added_without_thinking_is_closed(tmp_path: Path) -> None:
    ledger = LedgerSettings(database_url=f"sqlite:///{tmp_path}/l.db", artifact_root=tmp_path)
    app = create_app(Settings(ledger=ledger, key_secret=KEY_SECRET))

    @app.get("/new")
    def careless() -> str:
        return "secret"

    (added,) = [context for context in iter_route_contexts(app.routes) if context.path == "/new"]
    assert isinstance(added.original_route, APIRoute)
    assert authenticate in {each.call for each in added.original_route.dependant.dependencies}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Basic dXNlcjpwYXNz",
        "Bearer",
        "Bearer  x",
        "Bearer x y",
        "bearer kron_aaaaaaaaaaaaaaaa_bbbb",
        "Bearer \xff\xfe",
    ],
)
def test_wrong_credentials(keyed: Keyed, header: str) -> None:
    with keyed.server.client() as client:
        problem(client.get("/v1/jobs", headers={"authorization": header.encode("latin-1")}), 401)


def test_changed_revoked_and_misplaced_keys(keyed: Keyed) -> None:
    key = create_key(keyed.engine, KEY_SECRET, "ours", ("read",))
    with keyed.server.client() as client:

        def get(value: str) -> httpx.Response:
            return client.get("/v1/jobs", headers={"authorization": f"Bearer {value}"})

        assert get(key).status_code == 200
        problem(get(key + "x"), 401)
        problem(get(key[:-1] + ("0" if key[-1] != "0" else "1")), 401)
        problem(client.get("/v1/jobs", params={"key": key, "authorization": key}), 401)
        assert revoke_key(keyed.engine, key)
        problem(get(key), 401)


def test_a_reading_key_submits_nothing(keyed: Keyed) -> None:
    with keyed.server.client(keyed.reading_key) as client:
        assert client.get("/v1/jobs").status_code == 200
        problem(client.post("/v1/jobs", json={}), 403)
        problem(client.post("/v1/jobs/x:cancel"), 403)
        problem(client.put("/v1/jobs/x/schedule", json={}), 403)
        problem(client.delete("/v1/jobs/x"), 403)
