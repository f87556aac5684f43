"""The one room with a foot in both wings: the supervisor writes the ledger, the child runs the engine."""
