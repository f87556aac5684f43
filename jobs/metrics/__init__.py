"""Counters, and the snapshot of the ledger that metrics are computed from."""
