"""The cases of the architecture table: models from tiny configurations, each with a few different examples."""
