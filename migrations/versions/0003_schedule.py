"""The schedule that a submission asked for, so that a repeated one is distinguished from another."""

import sqlalchemy as sa

from migrations.steps import add_columns

revision = "0003"
down_revision = "0002"

upgrade, downgrade = add_columns("jobs", sa.Column("schedule", sa.JSON(none_as_null=True)))
