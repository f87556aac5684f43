"""When a queued job may be claimed again: one whose disk was full is not tried five times within seconds."""

import sqlalchemy as sa

from migrations.steps import MOMENT, add_columns

revision = "0008"
down_revision = "0007"

upgrade, downgrade = add_columns("jobs", sa.Column("not_before", MOMENT))
