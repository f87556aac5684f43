"""When a job's rows left the ledger for its archive, and an index of those that have not yet."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")
_RETAINED = sa.text("finished_at IS NOT NULL AND archived_at IS NULL")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("archived_at", _Moment))
    op.create_index("ix_jobs_retained", "jobs", ["finished_at"], postgresql_where=_RETAINED, sqlite_where=_RETAINED)


def downgrade() -> None:
    op.drop_index("ix_jobs_retained", "jobs")
    op.drop_column("jobs", "archived_at")
