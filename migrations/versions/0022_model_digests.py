"""Digests of models of the store, as a tenant's job has first seen each."""

import sqlalchemy as sa
from alembic import op

from migrations.steps import ID, MOMENT, PROVEN, part_tenants

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.create_table(
        "model_digests",
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("source_sha256", sa.String(64), nullable=False),
        sa.Column("model_sha256", sa.String(64), nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_model_digests_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("tenant_id", "source_sha256", name="pk_model_digests"),
    )
    part_tenants(PROVEN, "model_digests")


def downgrade() -> None:
    op.drop_table("model_digests")
