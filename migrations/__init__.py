"""The schema's history, applied by Alembic; ``jobs.schema.database`` finds it by this package's name."""
