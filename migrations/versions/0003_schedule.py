"""The schedule that a submission asked for, so that a repeated one is distinguished from another."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("schedule", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    op.drop_column("jobs", "schedule")
