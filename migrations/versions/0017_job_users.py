"""A number for each job that runs, from which its user on every machine follows."""

import sqlalchemy as sa
from alembic import op

from migrations.steps import DECLARED, ID, part_tenants

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "job_users",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_job_users_tenant_id_tenants"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_users_job_id_jobs", ondelete="CASCADE"),
        sa.UniqueConstraint("job_id", name="uq_job_users_job_id"),
        sa.PrimaryKeyConstraint("number", name="pk_job_users"),
        sqlite_autoincrement=True,
    )
    part_tenants(DECLARED, "job_users")


def downgrade() -> None:
    op.drop_table("job_users")
