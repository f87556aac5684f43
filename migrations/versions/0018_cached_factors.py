"""Rows of cached factors, with the digests of their files, which stood beside the files before."""

import sqlalchemy as sa
from alembic import op

from migrations.steps import DECLARED, ID, MOMENT, part_tenants

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.create_table(
        "cached_factors",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("place", ID, nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("files", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("left_at", MOMENT, nullable=False),
        sa.Column("used_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_cached_factors_tenant_id_tenants"),
        sa.UniqueConstraint("tenant_id", "place", "key", name="uq_cached_factors_tenant_id_place_key"),
        sa.PrimaryKeyConstraint("id", name="pk_cached_factors"),
    )
    part_tenants(DECLARED, "cached_factors")


def downgrade() -> None:
    op.drop_table("cached_factors")
