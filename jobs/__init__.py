"""The ledger: who owns a job, what it has written, and in which order. SQL only; it knows no torch."""
