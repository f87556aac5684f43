"""Loaders of models, one per source."""
