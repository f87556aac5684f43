"""Machines that are started for waiting jobs, and on PostgreSQL a view of those jobs for other autoscalers.

The view `waiting_jobs` shows what each job that could be claimed now needs, of all tenants, and nothing of its
document: it is read with its owner's rights.
"""

import sqlalchemy as sa
from alembic import op

from migrations.steps import ID, MOMENT

revision = "0014"
down_revision = "0013"

_STATES = "'starting', 'pending', 'running', 'ending', 'ended', 'failed'"
_VIEW = """
    CREATE VIEW waiting_jobs AS
    SELECT id AS job_id, coalesce(needs_bytes, 0) AS needs_bytes, device_class, world_size,
           model_factory, data_factory, priority, queued_at
    FROM jobs
    WHERE state = 'queued'
      AND (deadline_at IS NULL OR deadline_at > clock_timestamp())
      AND (not_before IS NULL OR not_before <= clock_timestamp())
"""


def upgrade() -> None:
    op.add_column("workers", sa.Column("machine_id", ID))
    op.create_table(
        "machines",
        sa.Column("id", ID, nullable=False),
        sa.Column("scope", sa.String(200), nullable=False),
        sa.Column("class_name", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("handle", sa.String(200)),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("asked_at", MOMENT, nullable=False),
        sa.Column("changed_at", MOMENT, nullable=False),
        sa.Column("joined_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_machines"),
        sa.CheckConstraint(f"state IN ({_STATES})", name="ck_machines_state"),
    )
    op.create_index("ix_machines_scope_class_name_asked_at", "machines", ["scope", "class_name", "asked_at"])
    op.create_table(
        "machine_classes",
        sa.Column("scope", sa.String(200), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("device_bytes", sa.BigInteger, nullable=False),
        sa.Column("devices", sa.Integer, nullable=False),
        sa.Column("jobs_per_device", sa.Integer, nullable=False),
        sa.Column("ceiling", sa.Integer, nullable=False),
        sa.Column("factories", sa.JSON, nullable=False),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("scope", "name", name="pk_machine_classes"),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(_VIEW)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP VIEW waiting_jobs")
    op.drop_table("machine_classes")
    op.drop_index("ix_machines_scope_class_name_asked_at", "machines")
    op.drop_table("machines")
    op.drop_column("workers", "machine_id")
