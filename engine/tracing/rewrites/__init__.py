"""Rewrites of operations: those that hide a parameter are made of ones that show it."""
