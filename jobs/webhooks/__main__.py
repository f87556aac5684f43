"""Send webhooks: ``python -P -m jobs.webhooks``, which sees webhooks and deliveries alone, and reaches the network.

A delivery is taken for half a minute, sent, and its outcome recorded; where its sender ends in between, it is sent
again under the same id. Each tenant has four under way at most, and those with the fewest come first, so that a server
which is slow or gone delays its own tenant alone. Of a server nothing is believed: its name is resolved once, each
address must be public or listed by the operator, the connection goes to the first one, and of the answer the status
counts.
"""

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import httpx
import structlog
from sqlalchemy import Engine, Row, delete, func, select, update
from standardwebhooks import Webhook

from catalog.public_address import Address, is_public
from jobs.errors import LedgerError, LedgerUnavailable, SettingsInvalid
from jobs.parent_process import end_with_parent
from jobs.schema.clock import ledger_now
from jobs.schema.database import current_database, reading, writing
from jobs.schema.webhook_tables import webhook_deliveries, webhooks
from jobs.service_log import configure_logging, log_last_words
from jobs.settings import LedgerSettings, WebhookSettings
from jobs.webhooks.registry import secrets_of

PAUSES_SECONDS = (5, 60, 300, 1800, 7200, 18_000, 36_000)
"""Between two attempts; after the last one a delivery has failed."""
_OF_A_TENANT, _AT_ONCE = 4, 256
_TRY_SECONDS, _TAKEN_SECONDS, _POLL_SECONDS = 10, 30, 1.0
_MOST_CHARACTERS = 200
_KEPT_SECONDS = 30 * 86_400
_REFUSED = "refused: the host must have public addresses alone, or be listed in KRONOSCOPE_WEBHOOK_HOSTS"
"""The same for a host without any: which names mean something in the operator's network is not said."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_D, _H = webhook_deliveries.c, webhooks.c
_log = structlog.get_logger("kronoscope.webhooks")


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Log what a round, or a delivery, ends by; it is done again."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - one delivery must not end those of other tenants
        _log.warning("it is tried again", why=str(error), exc_info=not isinstance(error, LedgerUnavailable))


class Sender:
    """The sender of all tenants' deliveries."""

    def __init__(self, engine: Engine, settings: WebhookSettings) -> None:
        self._engine, self._settings = engine, settings
        self._tls = httpx.create_ssl_context()  # with the authorities of SSL_CERT_FILE, where that is set
        self._running: dict[Future[None], str] = {}

    def run(self) -> None:
        """Send what is due until SIGTERM or SIGINT, which are blocked; what is under way then is sent."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            taken: list[Row[Any]] = []
            while signal.sigtimedwait(_SIGNALS, 0 if taken else _POLL_SECONDS) is None:
                taken = []
                with _logged():
                    taken = self._take()
                    if self._settings.pulse_file is not None:
                        self._settings.pulse_file.touch()
                    self._running |= {pool.submit(self._deliver, each): each.tenant_id for each in taken}

    def _take(self) -> list[Row[Any]]:
        """Take due deliveries, each with the address and the secrets of its webhook; drop what ended long ago."""
        self._running = {each: tenant for each, tenant in self._running.items() if not each.done()}
        busy = Counter(self._running.values())
        due = (_D.state == "pending", _D.due_at <= ledger_now())
        waiting = select(_D.tenant_id).where(*due).group_by(_D.tenant_id).order_by(func.min(_D.due_at))
        with reading(self._engine) as connection:
            tenants = sorted(connection.execute(waiting).scalars().all(), key=busy.__getitem__)
        found = select(webhook_deliveries, _H.url, _H.secrets).outerjoin(webhooks, _H.id == _D.webhook_id)
        taken: list[Row[Any]] = []
        for tenant in tenants:
            room = min(_OF_A_TENANT - busy[tenant], _AT_ONCE - busy.total() - len(taken))
            if room <= 0:
                continue
            first = select(_D.id).where(*due, _D.tenant_id == tenant).order_by(_D.due_at).limit(room)
            values = {"due_at": ledger_now(_TAKEN_SECONDS), "attempts": _D.attempts + 1}
            old = (_D.state != "pending", _D.tenant_id == tenant, _D.due_at < ledger_now(-_KEPT_SECONDS))
            with writing(self._engine) as connection:
                connection.execute(delete(webhook_deliveries).where(*old))
                ids = connection.execute(first.with_for_update(skip_locked=True)).scalars().all()
                connection.execute(update(webhook_deliveries).where(_D.id.in_(ids)).values(values))
                taken += connection.execute(found.where(_D.id.in_(ids))).all()
        return taken

    @_logged()
    def _deliver(self, taken: Row[Any]) -> None:
        """Send a delivery and record its outcome; one that is not recorded is sent again."""
        keys = secrets_of(self._settings.webhook_key or "", taken.secrets or "")
        accepted, outcome = False, "the webhook is deleted, or its secret is of another key: rotate it"
        if keys:
            # a loop of its own: the thread is free once its look-up of a name has ended, which cannot be cancelled
            accepted, outcome = asyncio.run(self._send(taken, keys))
        again = not accepted and taken.attempts <= len(PAUSES_SECONDS)
        due_at = ledger_now(PAUSES_SECONDS[taken.attempts - 1] if again else 0)
        state = "pending" if again else "delivered" if accepted else "failed"
        still = (_D.id == taken.id, _D.attempts == taken.attempts)
        changed = update(webhook_deliveries).where(*still).values(state=state, outcome=outcome, due_at=due_at)
        with writing(self._engine) as connection:
            connection.execute(changed)

    async def _send(self, taken: Row[Any], keys: Sequence[str]) -> tuple[bool, str]:
        """Post a delivery; returns whether the server has accepted it, and the outcome in words."""
        now = datetime.now(UTC)
        headers = {
            "content-type": "application/json",
            "user-agent": "kronoscope",
            "webhook-id": taken.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(Webhook(key).sign(taken.id, now, taken.payload) for key in keys),
        }
        try:
            async with asyncio.timeout(_TRY_SECONDS):
                url = httpx.URL(taken.url)
                named = {"sni_hostname": url.raw_host.decode()}
                headers["host"] = url.netloc.decode()
                addresses = await _resolve(url)
                if not addresses or not all(self._may_reach(url.host, each) for each in addresses):
                    return False, _REFUSED
                pinned = url.copy_with(host=str(addresses[0]))
                async with (
                    httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None) as client,  # noqa: S113
                    client.stream("POST", pinned, content=taken.payload, headers=headers, extensions=named) as answer,
                ):
                    said = ", and redirects are not followed" if answer.is_redirect else ""
                    return answer.is_success, f"answered {answer.status_code}{said}"
        except TimeoutError:
            return False, f"no answer within {_TRY_SECONDS} s"
        except Exception as error:  # noqa: BLE001 - whatever server and address make of the libraries is the outcome
            return False, f"the connection failed: {str(error)[:_MOST_CHARACTERS]}"

    def _may_reach(self, host: str, address: Address) -> bool:
        if is_public(address) or host in self._settings.webhook_hosts:
            return True
        for each in self._settings.webhook_hosts:
            with contextlib.suppress(ValueError):  # a name
                if address in ipaddress.ip_network(each, strict=False):
                    return True
        return False


async def _resolve(url: httpx.URL) -> list[Address]:
    """Return all addresses of a host, of the families that this machine has; none where it has none."""
    look_up, flags = asyncio.get_running_loop().getaddrinfo, socket.AI_ADDRCONFIG
    try:
        found = await look_up(url.raw_host.decode(), url.port or 443, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]


def main() -> int:
    """Run the sender until it is asked to end, or its parent ends (``--with-parent PID``)."""
    configure_logging()
    log_last_words()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    os.environ.setdefault("RES_OPTIONS", "timeout:2 attempts:2")  # of the resolver
    if sys.argv[1:2] == ["--with-parent"]:
        end_with_parent(int(sys.argv[2]))
    try:
        settings = WebhookSettings.from_environment(os.environ)
        if settings.webhook_key is None:
            raise SettingsInvalid("KRONOSCOPE_WEBHOOK_KEY is not set; set it to the API's")
        with current_database(LedgerSettings.from_environment(os.environ).database_url) as engine:
            Sender(engine, settings).run()
    except LedgerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
