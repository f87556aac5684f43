"""Ranks: processes that measure one model's data together, and what moves between them."""
