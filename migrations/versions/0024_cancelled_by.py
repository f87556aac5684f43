"""The API key that asked for the end of a job."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("cancel_requested_by", sa.String(32)))


def downgrade() -> None:
    op.drop_column("jobs", "cancel_requested_by")
