"""The registry of webhooks, each with a secret that is encrypted under the operator's key.

Two are valid while it is rotated: the newest, and the one before it until the next rotation.
"""

import base64
import hashlib
import json
import secrets

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from sqlalchemy import Engine, Row, delete, insert, select, update

from catalog.responses.views import timestamp
from catalog.webhooks import DeliveryView, WebhookView
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.identifiers import new_id
from jobs.schema.webhook_tables import webhook_deliveries, webhooks

MOST_WEBHOOKS = 10
"""The webhooks of one tenant: a change of a job's state writes a row for each."""
_MOST_LISTED = 100
_H, _D = webhooks.c, webhook_deliveries.c


def _cipher(keys: str) -> MultiFernet:
    digests = [hashlib.sha256(key.strip().encode()).digest() for key in keys.split(",")]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(digest)) for digest in digests])


def secrets_of(keys: str, stored: str) -> list[str]:
    """Return the secrets of a webhook, the newest first; none where they were encrypted under another key."""
    try:
        found: list[str] = json.loads(_cipher(keys).decrypt(stored))
    except InvalidToken:
        return []
    return found


def _add_secret(keys: str, stored: str) -> tuple[str, str]:
    """Return a new secret, and what is stored of it and the newest before."""
    secret = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
    return secret, _cipher(keys).encrypt(json.dumps([secret, *secrets_of(keys, stored)[:1]]).encode()).decode()


def create_webhook(engine: Engine, keys: str, tenant_id: str, url: str) -> WebhookView:
    """Store a webhook, and return it with its secret."""
    secret, stored = _add_secret(keys, "")
    row = {"id": new_id(), "tenant_id": tenant_id, "url": url, "secrets": stored, "created_at": ledger_now()}
    with writing(engine, tenant_id) as connection:
        return _view(connection.execute(insert(webhooks).values(row).returning(webhooks)).one(), secret)


def list_webhooks(engine: Engine, tenant_id: str) -> tuple[WebhookView, ...]:
    """Return a tenant's webhooks, the oldest first, without their secrets."""
    with reading(engine, tenant_id) as connection:
        rows = connection.execute(select(webhooks).where(_H.tenant_id == tenant_id).order_by(_H.id))
        return tuple(map(_view, rows))


def rotate_secret(engine: Engine, keys: str, tenant_id: str, webhook_id: str) -> WebhookView | None:
    """Give a webhook another secret, and return it with that; None if the tenant has no such webhook."""
    owned = (_H.tenant_id == tenant_id, _H.id == webhook_id)
    with writing(engine, tenant_id) as connection:
        row = connection.execute(select(webhooks).where(*owned).with_for_update()).one_or_none()
        if row is None:
            return None
        secret, stored = _add_secret(keys, row.secrets)
        connection.execute(update(webhooks).where(*owned).values(secrets=stored))
        return _view(row, secret)


def delete_webhook(engine: Engine, tenant_id: str, webhook_id: str) -> bool:
    """Delete a webhook with its deliveries; returns whether the tenant had it."""
    with writing(engine, tenant_id) as connection:
        of_it = (_D.tenant_id == tenant_id, _D.webhook_id == webhook_id)
        connection.execute(delete(webhook_deliveries).where(*of_it))
        gone = connection.execute(delete(webhooks).where(_H.tenant_id == tenant_id, _H.id == webhook_id))
        return gone.rowcount == 1


def list_deliveries(engine: Engine, tenant_id: str, webhook_id: str) -> tuple[DeliveryView, ...]:
    """Return the newest deliveries to a webhook, at most 100."""
    query = select(webhook_deliveries).where(_D.tenant_id == tenant_id, _D.webhook_id == webhook_id)
    with reading(engine, tenant_id) as connection:
        rows = connection.execute(query.order_by(_D.id.desc()).limit(_MOST_LISTED)).all()
    return tuple(
        DeliveryView(
            id=row.id, job=row.job_id, before=data["before"], after=data["after"], state=row.state,
            attempts=row.attempts, outcome=row.outcome,
            created_at=timestamp(row.created_at), due_at=timestamp(row.due_at),
        )
        for row in rows
        for data in (json.loads(row.payload)["data"],)
    )  # fmt: skip


def _view(row: Row[tuple[object, ...]], secret: str | None = None) -> WebhookView:
    return WebhookView(id=row.id, url=row.url, created_at=timestamp(row.created_at), secret=secret)
