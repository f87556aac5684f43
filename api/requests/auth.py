"""Authenticated requests: every route needs an API key unless its endpoint is opened by name.

The check is a dependency of the application itself, so that a new route is closed until someone
writes ``@open_to_all`` above it; ``tests/api/requests/test_auth.py`` counts those.
"""

import contextlib
import hmac
import time
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from api.live.job_watcher import read_in_time
from api.problem_details import Refusal
from api.service import Service, ServiceOf
from jobs.errors import LedgerUnavailable
from jobs.records import LOCAL_TENANT, Caller, Scope
from jobs.tenancy.api_keys import is_valid, verify_key

Endpoint = TypeVar("Endpoint", bound=Callable[..., object])

_AGAIN_SECONDS = 2.0
_OPEN = "kronoscope_open_to_all"
_SCRAPED = "kronoscope_for_the_scraper"
_LOCAL = Caller(tenant_id=LOCAL_TENANT, scopes=frozenset({"read", "submit", "admin"}))
_BEARER = HTTPBearer(
    scheme_name="key",
    description="`Authorization: Bearer KEY`; `kronoscope keys create` makes keys. Embedded mode needs none.",
    auto_error=False,
)


def open_to_all(endpoint: Endpoint) -> Endpoint:
    """Serve an endpoint without a key: a decorator for probes and the dashboard's files."""
    setattr(endpoint, _OPEN, True)
    return endpoint


def is_open(endpoint: object) -> bool:
    """Return whether an endpoint needs no key."""
    return getattr(endpoint, _OPEN, False) is True


def scraper_only(endpoint: Endpoint) -> Endpoint:
    """Serve an endpoint to the operator's token: a decorator for metrics, as the database of keys may be down."""
    setattr(endpoint, _SCRAPED, True)
    return endpoint


def is_scraper_only(endpoint: object) -> bool:
    """Return whether an endpoint needs the operator's token."""
    return getattr(endpoint, _SCRAPED, False) is True


NOT_VALID = "this key is not valid: mistyped, revoked or expired"


def unauthorised(detail: str) -> Refusal:
    """Return the refusal of a request without a valid key."""
    return Refusal(
        401, "unauthorised", "An API key is needed", detail, headers={"www-authenticate": 'Bearer realm="kronoscope"'}
    )


class KeyInUse:
    """The key of a request under way, which goes on only until the key is revoked or expires."""

    def __init__(self, service: Service, key: str | None) -> None:
        """Begin with a key that was verified just now, by its prefix; None, in embedded mode, stays valid."""
        self._keys, self._key = service.keys, key
        self._asked_at = time.monotonic()

    def is_valid(self) -> bool:
        """Return whether the key is neither revoked nor expired; ``LedgerUnavailable`` without an answer in time."""
        return self._key is None or read_in_time(is_valid, self._keys, self._key)

    def require(self) -> None:
        """Refuse to go on, with 401, if the key is no longer valid: before a write, or after a wait."""
        if not self.is_valid():
            raise unauthorised(NOT_VALID)

    def is_due(self) -> bool:
        """Return whether the key was not asked for in the last seconds: no query for each chunk of a long answer."""
        return self._key is not None and time.monotonic() - self._asked_at >= _AGAIN_SECONDS

    def require_if_due(self) -> None:
        """Refuse as `require` every few seconds; what is under way goes on while the database does not answer."""
        if self.is_due():
            self._asked_at = time.monotonic()
            with contextlib.suppress(LedgerUnavailable):
                self.require()


def authenticate(request: Request, service: ServiceOf, _: Annotated[object, Depends(_BEARER)]) -> None:
    """Store the caller of a request in its state, or refuse the request; embedded mode takes it without a key.

    Raises:
        Refusal: 401 if the key, or the operator's token, is missing or not valid.
    """
    if is_open(request.scope.get("endpoint")):
        return
    if service.settings.embedded:
        request.state.caller = _LOCAL
        return
    header = request.headers.get("authorization")
    if is_scraper_only(request.scope.get("endpoint")):
        _authenticate_scraper(service.settings.metrics_token, header)
        return
    if header is None:
        raise unauthorised("send `Authorization: Bearer KEY`; `kronoscope keys create` makes keys")
    scheme, _separator, presented = header.partition(" ")
    caller = None
    if scheme.lower() == "bearer" and service.settings.key_secret:
        caller = verify_key(service.keys, service.settings.key_secret, presented)
    if caller is None:
        raise unauthorised(NOT_VALID)
    request.state.caller = caller
    if caller.key is not None:
        client = request.app.state.addresses.client_of(request.scope)
        service.maintenance.key_uses.note(caller.key, client)


def _authenticate_scraper(token: str | None, header: str | None) -> None:
    """Refuse a wrong token, and any token where the operator has set none."""
    presented = (header or "").encode("utf-8", "replace")
    if token is None or not hmac.compare_digest(presented, f"Bearer {token}".encode()):
        raise unauthorised("send `Authorization: Bearer TOKEN`, with the operator's KRONOSCOPE_METRICS_TOKEN")


def _caller(scope: Scope) -> Callable[[Request], Caller]:
    def holder(request: Request) -> Caller:
        caller: Caller = request.state.caller
        if not caller.may(scope):
            raise Refusal(
                403,
                "scope-missing",
                "The key may not do this",
                f"this key lacks the scope `{scope}`; use one that has it",
            )
        return caller

    return holder


Reader = Annotated[Caller, Depends(_caller("read"))]
Submitter = Annotated[Caller, Depends(_caller("submit"))]
