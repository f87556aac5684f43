"""When each API key was last used, and from which client address."""

import sqlalchemy as sa

from migrations.steps import MOMENT, add_columns

revision = "0013"
down_revision = "0012"

upgrade, downgrade = add_columns(
    "api_keys", sa.Column("last_used_at", MOMENT), sa.Column("last_used_from", sa.String(64))
)
