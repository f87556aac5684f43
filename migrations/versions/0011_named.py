"""The caller's own name of a job, which lists are filtered by."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("name", sa.String(120)))


def downgrade() -> None:
    op.drop_column("jobs", "name")
