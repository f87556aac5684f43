"""Webhooks, and the deliveries to them."""

import sqlalchemy as sa
from alembic import op

from migrations.steps import ID, MOMENT, PROVEN, part_tenants

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", ID, primary_key=True),
        sa.Column("tenant_id", ID, sa.ForeignKey("tenants.id"), nullable=False, index=True),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secrets", sa.Text(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", ID, primary_key=True),
        sa.Column("tenant_id", ID, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("job_id", ID, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, index=True),
        sa.Column("webhook_id", ID, nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("state", sa.String(9), nullable=False, server_default=sa.text("'pending'")),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("outcome", sa.Text()),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("due_at", MOMENT, nullable=False),
    )
    op.create_index("ix_webhook_deliveries_webhook_id_id", "webhook_deliveries", ["webhook_id", "id"])
    due = ["state", "tenant_id", "due_at"]
    op.create_index("ix_webhook_deliveries_state_tenant_id_due_at", "webhook_deliveries", due)
    part_tenants(PROVEN, "webhooks", "webhook_deliveries")


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
