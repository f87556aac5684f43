"""The order in which a tenant's queued jobs are claimed, as an index of queued jobs alone."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_QUEUED = sa.text("state = 'queued'")


def upgrade() -> None:
    op.create_index(
        "ix_jobs_waiting",
        "jobs",
        ["tenant_id", sa.text("priority DESC"), "queued_at", "id"],
        postgresql_where=_QUEUED,
        sqlite_where=_QUEUED,
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_waiting", "jobs")
