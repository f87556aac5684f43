"""Steps that several migrations take, as they were then: this is history too, and does not move on with the schema."""

from collections.abc import Callable

import sqlalchemy as sa
from alembic import op

# A migration names types of its own and never those of jobs.schema.tables, which move on.
MOMENT = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")
ID = sa.String(36)
# in a query of its own it is asked for once, not for every row
DECLARED = "(SELECT current_setting('kronoscope.tenant', true))"
PROVEN = "(SELECT declared_tenant())"


def is_sqlite() -> bool:
    """Return whether the database is SQLite, else it is PostgreSQL."""
    return op.get_bind().dialect.name == "sqlite"


def now() -> str:
    """Return the expression of the database's present moment, as `MOMENT` stores it."""
    return "(julianday('now') - 2440587.5) * 86400.0" if is_sqlite() else "clock_timestamp()"


def add_columns(table: str, *columns: sa.Column[object]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the upgrade that adds columns to a table, and the downgrade that drops them."""

    def upgrade() -> None:
        for column in columns:
            op.add_column(table, column)

    def downgrade() -> None:
        for column in reversed(columns):
            op.drop_column(table, column.name)

    return upgrade, downgrade


def tenant_rows(table: str, tenant: str) -> str:
    """Return the condition that a row is of the transaction's tenant, `DECLARED` or since 0019 `PROVEN`; or of all."""
    column = "id" if table == "tenants" else "tenant_id"
    return f"{column} = {tenant} OR {tenant} = '*'"


def part_tenants(tenant: str, *tables: str) -> None:
    """Let a transaction see only the rows of its tenant, on PostgreSQL; the tables' owner sees all."""
    for table in () if is_sqlite() else tables:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY tenant_rows ON {table} USING ({tenant_rows(table, tenant)})")
        op.execute(f"CREATE POLICY owner_rows ON {table} TO CURRENT_USER USING (true)")
