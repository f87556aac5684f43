"""The ledger: tenants and keys, jobs with their outbox and events, layer results, artifacts."""

import sqlalchemy as sa
from alembic import op

from migrations.steps import ID, MOMENT, now

revision = "0001"
down_revision = None

_Sha256 = sa.String(64)
_STATES = "'queued', 'running', 'cancelling', 'succeeded', 'failed', 'cancelled'"


def upgrade() -> None:
    _create_tenants()
    _create_jobs()
    _create_rows_of_jobs()
    # embedded mode works under this tenant, without keys
    op.execute(sa.text(f"INSERT INTO tenants (id, name, created_at) VALUES ('local', 'local', {now()})"))  # noqa: S608 - constants


def downgrade() -> None:
    for table in ("artifacts", "layer_results", "job_events", "outbox", "jobs", "api_keys", "tenants"):
        op.drop_table(table)


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("quotas", sa.JSON()),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("prefix", sa.String(32), nullable=False),
        sa.Column("hmac", _Sha256, nullable=False),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT),
        sa.Column("revoked_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("prefix", name="uq_api_keys_prefix"),
        _tenant("api_keys"),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("kind", sa.String(500), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("document_sha256", _Sha256, nullable=False),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("priority", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("world_size", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("needs_bytes", sa.BigInteger()),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("failures", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_failures", sa.Integer(), server_default=sa.text("5"), nullable=False),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("claim_token", sa.String(64)),
        sa.Column("event_seq", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_owner", sa.String(200)),
        sa.Column("lease_expires_at", MOMENT),
        sa.Column("cancel_requested_at", MOMENT),
        sa.Column("deadline_at", MOMENT),
        sa.Column("progress", sa.JSON()),
        sa.Column("failure", sa.JSON()),
        sa.Column("plan", sa.JSON()),
        sa.Column("manifest", sa.JSON()),
        sa.Column("summary", sa.JSON()),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("queued_at", MOMENT, nullable=False),
        sa.Column("started_at", MOMENT),
        sa.Column("finished_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("tenant_id", "idempotency_key", name="uq_jobs_tenant_id_idempotency_key"),
        sa.CheckConstraint(f"state IN ({_STATES})", name=op.f("ck_jobs_state")),
        _tenant("jobs"),
    )
    op.create_index("ix_jobs_tenant_id_id", "jobs", ["tenant_id", "id"])
    op.create_index("ix_jobs_state_lease_expires_at", "jobs", ["state", "lease_expires_at"])
    op.create_table(
        "outbox",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("sent_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        _tenant("outbox"),
        _job("outbox"),
    )
    op.create_index("ix_outbox_job_id", "outbox", ["job_id"])


def _create_rows_of_jobs() -> None:
    op.create_table(
        "job_events",
        sa.Column("job_id", ID, nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("type", sa.String(40), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_job_events"),
        _tenant("job_events"),
        _job("job_events"),
    )
    op.create_table(
        "layer_results",
        sa.Column("job_id", ID, nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("layer", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("sha256", _Sha256, nullable=False),
        sa.Column("outcome", sa.JSON(), nullable=False),
        sa.Column("observed", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "kind", "ordinal", name="pk_layer_results"),
        _tenant("layer_results"),
        _job("layer_results"),
    )
    op.create_table(
        "artifacts",
        sa.Column("job_id", ID, nullable=False),
        sa.Column("name", sa.String(500), nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("sha256", _Sha256, nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("media_type", sa.String(200), nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", name="pk_artifacts"),
        _tenant("artifacts"),
        _job("artifacts"),
    )


def _tenant(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=f"fk_{table}_tenant_id_tenants")


def _job(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=f"fk_{table}_job_id_jobs", ondelete="CASCADE")
