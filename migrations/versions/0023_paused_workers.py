"""The reason why a worker takes no jobs at the moment, such as a full disk."""

import sqlalchemy as sa

from migrations.steps import add_columns

revision = "0023"
down_revision = "0022"

upgrade, downgrade = add_columns("workers", sa.Column("paused", sa.String(300)))
