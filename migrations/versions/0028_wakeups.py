"""No outbox: wake-ups are sent after the commit, once, and the workers' polls find what they miss."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")
_PROVEN = "(SELECT declared_tenant())"


def upgrade() -> None:
    op.drop_table("outbox")
    op.execute("DELETE FROM counters WHERE name = 'rounds' AND label = 'relay'")  # it would look silent for ever


def downgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("sent_at", _Moment),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_outbox_tenant_id_tenants"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_outbox_job_id_jobs", ondelete="CASCADE"),
    )
    op.create_index("ix_outbox_job_id", "outbox", ["job_id"])
    sqlite = op.get_bind().dialect.name == "sqlite"
    now = "(julianday('now') - 2440587.5) * 86400.0" if sqlite else "clock_timestamp()"
    op.execute(
        "INSERT INTO outbox (id, tenant_id, job_id, created_at) "  # noqa: S608 - constants
        f"SELECT id, tenant_id, id, {now} FROM jobs WHERE state = 'queued'"
    )
    if not sqlite:
        op.execute("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY tenant_rows ON outbox USING (tenant_id = {_PROVEN} OR {_PROVEN} = '*')")
        op.execute("CREATE POLICY owner_rows ON outbox TO CURRENT_USER USING (true)")
