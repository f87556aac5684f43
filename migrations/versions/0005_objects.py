"""Which rows name an object: asked before one is removed, and when a tenant's bytes are counted."""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_index("ix_artifacts_tenant_id_uri", "artifacts", ["tenant_id", "uri"])


def downgrade() -> None:
    op.drop_index("ix_artifacts_tenant_id_uri", "artifacts")
