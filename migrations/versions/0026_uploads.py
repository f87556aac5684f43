"""Files that tenants upload: models and data that jobs name by the upload's id."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True).with_variant(sa.Double(), "sqlite")
_PROVEN = "(SELECT declared_tenant())"


def upgrade() -> None:
    op.create_table(
        "upload_files",
        sa.Column("upload_id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("tenant_id", sa.String(36), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("changed_at", _Moment, nullable=False),
        sa.Column("stored_at", _Moment),
        sa.Column("completed_at", _Moment),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_upload_files_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("upload_id", "name", name="pk_upload_files"),
    )
    op.create_index("ix_upload_files_tenant_id_uri", "upload_files", ["tenant_id", "uri"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE upload_files ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY tenant_rows ON upload_files USING (tenant_id = {_PROVEN} OR {_PROVEN} = '*')")
        op.execute("CREATE POLICY owner_rows ON upload_files TO CURRENT_USER USING (true)")


def downgrade() -> None:
    op.drop_table("upload_files")
