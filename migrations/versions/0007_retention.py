"""When a job's rows left the ledger for its archive, and an index of those that have not yet."""

import sqlalchemy as sa
from alembic import op

from migrations.steps import MOMENT

revision = "0007"
down_revision = "0006"

_RETAINED = sa.text("finished_at IS NOT NULL AND archived_at IS NULL")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("archived_at", MOMENT))
    op.create_index("ix_jobs_retained", "jobs", ["finished_at"], postgresql_where=_RETAINED, sqlite_where=_RETAINED)


def downgrade() -> None:
    op.drop_index("ix_jobs_retained", "jobs")
    op.drop_column("jobs", "archived_at")
