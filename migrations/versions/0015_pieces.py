"""Jobs that divide: the state `waiting`, and child jobs that compute the pieces of their parent.

SQLite alters no constraint, and copying `jobs` would delete by cascade what hangs on it; so the text of its CHECK is
replaced in the schema table, as its manual describes (https://www.sqlite.org/lang_altertable.html#otheralter).
"""

import sqlalchemy as sa
from alembic import op

from migrations.steps import ID, is_sqlite, now

revision = "0015"
down_revision = "0014"

_CHECK = "CONSTRAINT ck_jobs_state CHECK (state IN ({}))"
_BEFORE = _CHECK.format("'queued', 'running', 'cancelling', 'succeeded', 'failed', 'cancelled'")
_SINCE = _CHECK.format("'queued', 'running', 'waiting', 'cancelling', 'succeeded', 'failed', 'cancelled'")
_PARENT = "CONSTRAINT fk_jobs_parent_id_jobs FOREIGN KEY (parent_id) REFERENCES jobs (id) ON DELETE CASCADE"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("parent_id", ID))
    op.add_column("jobs", sa.Column("piece", sa.JSON()))
    op.create_index("ix_jobs_parent_id", "jobs", ["parent_id"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE jobs DROP CONSTRAINT ck_jobs_state, ADD {_SINCE}, ADD {_PARENT}")
    else:
        _replace_text(_BEFORE, f"{_PARENT}, {_SINCE}")


def downgrade() -> None:
    # a job that waits for its pieces begins anew: the code of before knows neither
    op.execute("DELETE FROM jobs WHERE parent_id IS NOT NULL")
    op.execute(
        "INSERT INTO outbox (id, tenant_id, job_id, created_at) "  # noqa: S608 - constants
        f"SELECT id, tenant_id, id, {now()} FROM jobs WHERE state = 'waiting'"
    )
    op.execute("UPDATE jobs SET state = 'queued', progress = NULL WHERE state = 'waiting'")
    if is_sqlite():
        _replace_text(f"{_PARENT}, {_SINCE}", _BEFORE)
    else:
        op.execute(
            f"ALTER TABLE jobs DROP CONSTRAINT fk_jobs_parent_id_jobs, DROP CONSTRAINT ck_jobs_state, ADD {_BEFORE}"
        )
    op.drop_index("ix_jobs_parent_id", "jobs")
    op.drop_column("jobs", "piece")
    op.drop_column("jobs", "parent_id")


def _replace_text(before: str, after: str) -> None:
    connection = op.get_bind()
    version = connection.exec_driver_sql("PRAGMA schema_version").scalar_one()
    connection.exec_driver_sql("PRAGMA writable_schema = ON")
    connection.exec_driver_sql(
        "UPDATE sqlite_schema SET sql = replace(sql, ?, ?) WHERE type = 'table' AND name = 'jobs'", (before, after)
    )
    connection.exec_driver_sql(f"PRAGMA schema_version = {version + 1}")
    connection.exec_driver_sql("PRAGMA writable_schema = OFF")
