"""Row-level security on PostgreSQL: a transaction sees the rows of the tenant that it declares.

Who owns the tables passes, so that one role for everything works as before; the roles that
`migrations.roles` makes own none.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_TABLES = {
    "tenants": "id",
    "api_keys": "tenant_id",
    "jobs": "tenant_id",
    "outbox": "tenant_id",
    "job_events": "tenant_id",
    "layer_results": "tenant_id",
    "artifacts": "tenant_id",
    "device_leases": "tenant_id",
}
# in a query of its own it is asked for once, not for every row
_DECLARED = "(SELECT current_setting('kronoscope.tenant', true))"


def upgrade() -> None:
    op.add_column("workers", sa.Column("isolation", sa.JSON()))
    if op.get_bind().dialect.name != "postgresql":
        return
    for table, column in _TABLES.items():
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY tenant_rows ON {table} USING ({column} = {_DECLARED} OR {_DECLARED} = '*')")
        op.execute(f"CREATE POLICY owner_rows ON {table} TO CURRENT_USER USING (true)")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for table in _TABLES:
            for policy in ("tenant_rows", "owner_rows", "worker_rows"):
                op.execute(f"DROP POLICY IF EXISTS {policy} ON {table}")
            op.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY")
    op.drop_column("workers", "isolation")
