"""The schema's history, applied by Alembic; ``jobs.database`` finds it by this package's name."""
