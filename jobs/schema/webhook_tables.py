"""The tables of webhooks and of what is sent to them, the only ones that the sender sees."""

from sqlalchemy import Column, ForeignKey, Index, Integer, String, Table, Text, text

from jobs.schema.clock import Moment
from jobs.schema.tables import metadata

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("tenant_id", String(36), ForeignKey("tenants.id"), nullable=False),
    Column("url", Text, nullable=False),
    Column("secrets", Text, nullable=False),  # encrypted, as a list: the newest, and the one that it replaced
    Column("created_at", Moment(), nullable=False),
    Index(None, "tenant_id"),
)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("tenant_id", String(36), ForeignKey("tenants.id"), nullable=False),
    Column("job_id", String(36), ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    # no foreign key: the end of a job must not fail by a webhook that is deleted in the same moment
    Column("webhook_id", String(36), nullable=False),
    Column("payload", Text, nullable=False),
    Column("state", String(9), nullable=False, server_default=text("'pending'")),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("outcome", Text),
    Column("created_at", Moment(), nullable=False),
    Column("due_at", Moment(), nullable=False),
    Index(None, "job_id"),
    Index(None, "webhook_id", "id"),
    Index(None, "state", "tenant_id", "due_at"),
)
