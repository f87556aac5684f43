"""No outbox: wake-ups are sent after the commit, once, and the workers' polls find what they miss."""

import sqlalchemy as sa
from alembic import op

from migrations.steps import ID, MOMENT, PROVEN, now, part_tenants

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    op.drop_table("outbox")
    op.execute("DELETE FROM counters WHERE name = 'rounds' AND label = 'relay'")  # it would look silent for ever


def downgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("sent_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_outbox_tenant_id_tenants"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_outbox_job_id_jobs", ondelete="CASCADE"),
    )
    op.create_index("ix_outbox_job_id", "outbox", ["job_id"])
    op.execute(
        "INSERT INTO outbox (id, tenant_id, job_id, created_at) "  # noqa: S608 - constants
        f"SELECT id, tenant_id, id, {now()} FROM jobs WHERE state = 'queued'"
    )
    part_tenants(PROVEN, "outbox")
