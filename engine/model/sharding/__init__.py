"""Sharded models: those whose parameters are brought together unit by unit while they are measured."""
