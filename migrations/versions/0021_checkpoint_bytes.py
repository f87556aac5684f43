"""The bytes that an attempt leaves for the next one, which count for its tenant."""

import sqlalchemy as sa

from migrations.steps import add_columns

revision = "0021"
down_revision = "0019"

upgrade, downgrade = add_columns("jobs", sa.Column("checkpoint_bytes", sa.BigInteger))
