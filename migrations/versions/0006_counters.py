"""Counters: totals for the operator that outlive processes and deleted jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "counters",
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("label", sa.String(80), nullable=False),
        sa.Column("shard", sa.Integer, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.Column("changed_at", _Moment, nullable=False),
        sa.PrimaryKeyConstraint("name", "label", "shard", name="pk_counters"),
    )
    now = "(julianday('now') - 2440587.5) * 86400.0" if op.get_bind().dialect.name == "sqlite" else "clock_timestamp()"
    # the jobs that have ended so far; all else is counted from here on
    op.execute(
        sa.text(
            "INSERT INTO counters (name, label, shard, value, changed_at) "  # noqa: S608 - constants
            f"SELECT 'moves', state, 0, count(*), {now} FROM jobs "
            "WHERE state IN ('succeeded', 'failed', 'cancelled') GROUP BY state"
        )
    )


def downgrade() -> None:
    op.drop_table("counters")
