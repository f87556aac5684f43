"""Labels and the note of a job, which may be edited, and the job whose cached factors it took."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"

_FILL = {
    "postgresql": "UPDATE jobs SET labels = document->'labels'",
    "sqlite": "UPDATE jobs SET labels = json_extract(document, '$.labels')",
}


def upgrade() -> None:
    op.add_column("jobs", sa.Column("labels", sa.JSON()))
    op.add_column("jobs", sa.Column("note", sa.String(2000)))
    op.add_column("jobs", sa.Column("factors_from", sa.String(36)))
    op.create_index("ix_jobs_tenant_id_factors_from", "jobs", ["tenant_id", "factors_from"])
    op.execute(_FILL[op.get_bind().dialect.name])


def downgrade() -> None:
    op.drop_index("ix_jobs_tenant_id_factors_from", "jobs")
    for name in ("factors_from", "note", "labels"):
        op.drop_column("jobs", name)
