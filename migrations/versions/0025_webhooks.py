"""Webhooks, and the deliveries to them."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")
_PROVEN = "(SELECT declared_tenant())"


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("tenant_id", sa.String(36), sa.ForeignKey("tenants.id"), nullable=False, index=True),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secrets", sa.Text(), nullable=False),
        sa.Column("created_at", _Moment, nullable=False),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("tenant_id", sa.String(36), sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("job_id", sa.String(36), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, index=True),
        sa.Column("webhook_id", sa.String(36), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("state", sa.String(9), nullable=False, server_default=sa.text("'pending'")),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("outcome", sa.Text()),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("due_at", _Moment, nullable=False),
    )
    op.create_index("ix_webhook_deliveries_webhook_id_id", "webhook_deliveries", ["webhook_id", "id"])
    due = ["state", "tenant_id", "due_at"]
    op.create_index("ix_webhook_deliveries_state_tenant_id_due_at", "webhook_deliveries", due)
    for name in ("webhooks", "webhook_deliveries") if op.get_bind().dialect.name == "postgresql" else ():
        op.execute(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY tenant_rows ON {name} USING (tenant_id = {_PROVEN} OR {_PROVEN} = '*')")
        op.execute(f"CREATE POLICY owner_rows ON {name} TO CURRENT_USER USING (true)")


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
