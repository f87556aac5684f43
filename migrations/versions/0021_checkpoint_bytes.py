"""The bytes that an attempt leaves for the next one, which count for its tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("checkpoint_bytes", sa.BigInteger))


def downgrade() -> None:
    op.drop_column("jobs", "checkpoint_bytes")
