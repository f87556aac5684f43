"""Loaders of data, one per source."""
