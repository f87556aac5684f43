"""The reason why a worker takes no jobs at the moment, such as a full disk."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("paused", sa.String(300)))


def downgrade() -> None:
    op.drop_column("workers", "paused")
