"""Other tools that read our exported files, each in an environment of its own: ``make test-consumers``."""
