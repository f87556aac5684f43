"""A number for each job that runs, from which its user on every machine follows."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_DECLARED = "(SELECT current_setting('kronoscope.tenant', true))"


def upgrade() -> None:
    op.create_table(
        "job_users",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_job_users_tenant_id_tenants"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_users_job_id_jobs", ondelete="CASCADE"),
        sa.UniqueConstraint("job_id", name="uq_job_users_job_id"),
        sa.PrimaryKeyConstraint("number", name="pk_job_users"),
        sqlite_autoincrement=True,
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE job_users ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY tenant_rows ON job_users USING (tenant_id = {_DECLARED} OR {_DECLARED} = '*')")
        op.execute("CREATE POLICY owner_rows ON job_users TO CURRENT_USER USING (true)")


def downgrade() -> None:
    op.drop_table("job_users")
