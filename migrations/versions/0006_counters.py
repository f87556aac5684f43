"""Counters: totals for the operator that outlive processes and deleted jobs."""

import sqlalchemy as sa
from alembic import op

from migrations.steps import MOMENT, now

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "counters",
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("label", sa.String(80), nullable=False),
        sa.Column("shard", sa.Integer, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.Column("changed_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("name", "label", "shard", name="pk_counters"),
    )
    # the jobs that have ended so far; all else is counted from here on
    op.execute(
        sa.text(
            "INSERT INTO counters (name, label, shard, value, changed_at) "  # noqa: S608 - constants
            f"SELECT 'moves', state, 0, count(*), {now()} FROM jobs "
            "WHERE state IN ('succeeded', 'failed', 'cancelled') GROUP BY state"
        )
    )


def downgrade() -> None:
    op.drop_table("counters")
