"""Digests of models of the store, as a tenant's job has first seen each."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")
_PROVEN = "(SELECT declared_tenant())"


def upgrade() -> None:
    op.create_table(
        "model_digests",
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("source_sha256", sa.String(64), nullable=False),
        sa.Column("model_sha256", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("seen_at", _Moment, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_model_digests_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("tenant_id", "source_sha256", name="pk_model_digests"),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE model_digests ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY tenant_rows ON model_digests USING (tenant_id = {_PROVEN} OR {_PROVEN} = '*')")
        op.execute("CREATE POLICY owner_rows ON model_digests TO CURRENT_USER USING (true)")


def downgrade() -> None:
    op.drop_table("model_digests")
