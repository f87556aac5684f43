"""When a queued job may be claimed again: one whose disk was full is not tried five times within seconds."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("not_before", _Moment))


def downgrade() -> None:
    op.drop_column("jobs", "not_before")
