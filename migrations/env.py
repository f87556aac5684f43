"""The environment that Alembic runs migrations in: the connection handed over, or the database of the variables."""

import os

from alembic import context
from sqlalchemy import Connection

from jobs.schema.database import open_database
from jobs.schema.webhook_tables import webhooks
from jobs.settings import LedgerSettings


def run(connection: Connection) -> None:
    """Run what the command asks for, in the connection's transaction."""
    context.configure(
        connection=connection,
        target_metadata=webhooks.metadata,
        compare_type=True,
        compare_server_default=True,
        render_as_batch=connection.dialect.name == "sqlite",  # SQLite alters a table by copying it
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    raise SystemExit("migrations read the database's state; run them online, without --sql")

given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    engine = open_database(LedgerSettings.from_environment(os.environ).database_url)
    with engine.begin() as opened:
        run(opened)
    engine.dispose()
