"""Row-level security on PostgreSQL: a transaction sees the rows of the tenant that it declares.

Who owns the tables passes, so that one role for everything works as before; the roles that
`migrations.roles` makes own none.
"""

import sqlalchemy as sa
from alembic import op

from migrations.steps import DECLARED, is_sqlite, part_tenants

revision = "0012"
down_revision = "0011"

_TABLES = ("tenants", "api_keys", "jobs", "outbox", "job_events", "layer_results", "artifacts", "device_leases")


def upgrade() -> None:
    op.add_column("workers", sa.Column("isolation", sa.JSON()))
    part_tenants(DECLARED, *_TABLES)


def downgrade() -> None:
    for table in () if is_sqlite() else _TABLES:
        for policy in ("tenant_rows", "owner_rows", "worker_rows"):
            op.execute(f"DROP POLICY IF EXISTS {policy} ON {table}")
        op.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY")
    op.drop_column("workers", "isolation")
