"""``kronoscope run``: the same child process, its output in a folder instead of the ledger."""
