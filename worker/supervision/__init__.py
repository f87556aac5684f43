"""One job from claim to end, seen from the parent process, which writes the ledger."""
