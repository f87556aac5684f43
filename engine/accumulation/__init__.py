"""Hooks, and the running sums of one layer that they feed."""
