"""Rows of cached factors, with the digests of their files, which stood beside the files before."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")
_DECLARED = "(SELECT current_setting('kronoscope.tenant', true))"


def upgrade() -> None:
    op.create_table(
        "cached_factors",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("place", sa.String(36), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("files", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("left_at", _Moment, nullable=False),
        sa.Column("used_at", _Moment, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_cached_factors_tenant_id_tenants"),
        sa.UniqueConstraint("tenant_id", "place", "key", name="uq_cached_factors_tenant_id_place_key"),
        sa.PrimaryKeyConstraint("id", name="pk_cached_factors"),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE cached_factors ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY tenant_rows ON cached_factors USING (tenant_id = {_DECLARED} OR {_DECLARED} = '*')")
        op.execute("CREATE POLICY owner_rows ON cached_factors TO CURRENT_USER USING (true)")


def downgrade() -> None:
    op.drop_table("cached_factors")
