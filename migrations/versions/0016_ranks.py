"""Several devices leased by one attempt: the device becomes part of the key of its lease."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

_OLD, _NEW = ["job_id", "fence"], ["job_id", "fence", "device_uuid"]


def upgrade() -> None:
    _rekey(_NEW)


def downgrade() -> None:
    # an attempt that still holds several devices keeps one: the older code knows no more of it
    op.execute(
        "DELETE FROM device_leases WHERE EXISTS (SELECT 1 FROM device_leases AS first"
        " WHERE first.job_id = device_leases.job_id AND first.fence = device_leases.fence"
        " AND first.device_uuid < device_leases.device_uuid)"
    )
    _rekey(_OLD)


def _rekey(columns: list[str]) -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.drop_constraint("pk_device_leases", "device_leases")
        op.create_primary_key("pk_device_leases", "device_leases", columns)
        return
    # SQLite changes no key in place
    leases = sa.Table("device_leases", sa.MetaData(), autoload_with=op.get_bind())
    names = ", ".join(column.name for column in leases.columns)
    op.execute("ALTER TABLE device_leases RENAME TO former_device_leases")
    op.execute("DROP INDEX ix_device_leases_device_uuid")
    op.execute("DROP INDEX ix_device_leases_whole")
    op.create_table(
        "device_leases",
        *(sa.Column(each.name, each.type, nullable=each.nullable) for each in leases.columns),
        sa.PrimaryKeyConstraint(*columns, name="pk_device_leases"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_device_leases_tenant_id_tenants"),
        sa.ForeignKeyConstraint(["device_uuid"], ["devices.uuid"], name="fk_device_leases_device_uuid_devices"),
    )
    op.execute(f"INSERT INTO device_leases ({names}) SELECT {names} FROM former_device_leases")  # noqa: S608
    op.execute("DROP TABLE former_device_leases")
    op.create_index("ix_device_leases_device_uuid", "device_leases", ["device_uuid"])
    op.create_index(
        "ix_device_leases_whole", "device_leases", ["device_uuid"], unique=True, sqlite_where=sa.text("whole")
    )
