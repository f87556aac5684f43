"""When it was last read what others than jobs hold of a device: where jobs keep it from being read, it is doubted."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")


def upgrade() -> None:
    op.add_column("devices", sa.Column("foreign_at", _Moment))


def downgrade() -> None:
    op.drop_column("devices", "foreign_at")
