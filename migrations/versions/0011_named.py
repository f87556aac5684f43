"""The caller's own name of a job, which lists are filtered by."""

import sqlalchemy as sa

from migrations.steps import add_columns

revision = "0011"
down_revision = "0010"

upgrade, downgrade = add_columns("jobs", sa.Column("name", sa.String(120)))
