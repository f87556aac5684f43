"""The front door: REST API and dashboard, over the ledger and without torch."""
