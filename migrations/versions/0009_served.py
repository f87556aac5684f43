"""When a job of each tenant was last claimed: where nothing runs, that is whose turn comes last."""

import sqlalchemy as sa

from migrations.steps import MOMENT, add_columns

revision = "0009"
down_revision = "0008"

upgrade, downgrade = add_columns("tenants", sa.Column("served_at", MOMENT))
