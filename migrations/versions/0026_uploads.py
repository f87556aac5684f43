"""Files that tenants upload: models and data that jobs name by the upload's id."""

import sqlalchemy as sa
from alembic import op

from migrations.steps import ID, MOMENT, PROVEN, part_tenants

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    op.create_table(
        "upload_files",
        sa.Column("upload_id", ID, nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("changed_at", MOMENT, nullable=False),
        sa.Column("stored_at", MOMENT),
        sa.Column("completed_at", MOMENT),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_upload_files_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("upload_id", "name", name="pk_upload_files"),
    )
    op.create_index("ix_upload_files_tenant_id_uri", "upload_files", ["tenant_id", "uri"])
    part_tenants(PROVEN, "upload_files")


def downgrade() -> None:
    op.drop_table("upload_files")
