"""When it was last read what others than jobs hold of a device: where jobs keep it from being read, it is doubted."""

import sqlalchemy as sa

from migrations.steps import MOMENT, add_columns

revision = "0010"
down_revision = "0009"

upgrade, downgrade = add_columns("devices", sa.Column("foreign_at", MOMENT))
