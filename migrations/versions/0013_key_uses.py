"""When each API key was last used, and from which client address."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("last_used_at", _Moment))
    op.add_column("api_keys", sa.Column("last_used_from", sa.String(64)))


def downgrade() -> None:
    op.drop_column("api_keys", "last_used_from")
    op.drop_column("api_keys", "last_used_at")
