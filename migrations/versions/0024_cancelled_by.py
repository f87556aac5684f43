"""The API key that asked for the end of a job."""

import sqlalchemy as sa

from migrations.steps import add_columns

revision = "0024"
down_revision = "0023"

upgrade, downgrade = add_columns("jobs", sa.Column("cancel_requested_by", sa.String(32)))
