"""Workers and devices, what jobs lease of them, and what a job asks of the worker that takes it."""

import sqlalchemy as sa
from alembic import op

from migrations.steps import ID, MOMENT

revision = "0004"
down_revision = "0003"

_WHOLE = sa.text("whole")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("device_class", sa.String(8)))
    for source in ("model", "data"):
        op.add_column("jobs", sa.Column(f"{source}_factory", sa.Text))
        # jobs that wait or run keep asking for what their documents name
        document: sa.ColumnClause[object] = sa.literal_column("document")
        found = (
            sa.func.json_extract_path_text(document, source, "factory")
            if op.get_bind().dialect.name == "postgresql"
            else sa.func.json_extract(document, f"$.{source}.factory")
        )
        jobs = sa.table("jobs", sa.column(f"{source}_factory"), sa.column("state"))
        op.execute(jobs.update().values({f"{source}_factory": found}).where(jobs.c.state.in_(("queued", "running"))))
    op.create_table(
        "workers",
        sa.Column("id", ID, nullable=False),
        sa.Column("node", sa.String(200), nullable=False),
        sa.Column("process_space", sa.String(300), nullable=False),
        sa.Column("version", sa.String(40), nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("factories", sa.JSON, nullable=False),
        sa.Column("started_at", MOMENT, nullable=False),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_table(
        "devices",
        sa.Column("uuid", sa.String(100), nullable=False),
        sa.Column("node", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("capacity_bytes", sa.BigInteger, nullable=False),
        sa.Column("foreign_bytes", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("lease_seq", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("reserved_job_id", ID),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("uuid", name="pk_devices"),
        sa.CheckConstraint("kind IN ('cuda', 'fake', 'host')", name="ck_devices_kind"),
    )
    op.create_table(
        "worker_devices",
        sa.Column("worker_id", ID, nullable=False),
        sa.Column("device_uuid", sa.String(100), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "device_uuid", name="pk_worker_devices"),
        sa.ForeignKeyConstraint(
            ["worker_id"], ["workers.id"], name="fk_worker_devices_worker_id_workers", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["device_uuid"], ["devices.uuid"], name="fk_worker_devices_device_uuid_devices", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_worker_devices_device_uuid", "worker_devices", ["device_uuid"])
    op.create_table(
        "device_leases",
        sa.Column("job_id", ID, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("device_uuid", sa.String(100), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("whole", sa.Boolean, nullable=False),
        sa.Column("worker_id", ID, nullable=False),
        sa.Column("process_space", sa.String(300), nullable=False),
        sa.Column("guardian_pid", sa.Integer),
        sa.Column("guardian_started", sa.BigInteger),
        sa.Column("leased_at", MOMENT, nullable=False),
        sa.Column("draining_at", MOMENT),
        sa.PrimaryKeyConstraint("job_id", "fence", name="pk_device_leases"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_device_leases_tenant_id_tenants"),
        sa.ForeignKeyConstraint(["device_uuid"], ["devices.uuid"], name="fk_device_leases_device_uuid_devices"),
    )
    op.create_index("ix_device_leases_device_uuid", "device_leases", ["device_uuid"])
    op.create_index(
        "ix_device_leases_whole",
        "device_leases",
        ["device_uuid"],
        unique=True,
        postgresql_where=_WHOLE,
        sqlite_where=_WHOLE,
    )


def downgrade() -> None:
    for table in ("device_leases", "worker_devices", "devices", "workers"):
        op.drop_table(table)
    for column in ("data_factory", "model_factory", "device_class"):
        op.drop_column("jobs", column)
