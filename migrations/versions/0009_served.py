"""When a job of each tenant was last claimed: where nothing runs, that is whose turn comes last."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")


def upgrade() -> None:
    op.add_column("tenants", sa.Column("served_at", _Moment))


def downgrade() -> None:
    op.drop_column("tenants", "served_at")
