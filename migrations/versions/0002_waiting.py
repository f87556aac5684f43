"""The order in which a tenant's queued jobs are claimed, and their deadlines: indexes of queued jobs alone."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_QUEUED = sa.text("state = 'queued'")
_WITH_DEADLINE = sa.text("state = 'queued' AND deadline_at IS NOT NULL")


def upgrade() -> None:
    op.create_index(
        "ix_jobs_waiting",
        "jobs",
        ["tenant_id", sa.text("priority DESC"), "queued_at", "id"],
        postgresql_where=_QUEUED,
        sqlite_where=_QUEUED,
    )
    op.create_index(
        "ix_jobs_overdue",
        "jobs",
        ["deadline_at"],
        postgresql_where=_WITH_DEADLINE,
        sqlite_where=_WITH_DEADLINE,
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_overdue", "jobs")
    op.drop_index("ix_jobs_waiting", "jobs")
