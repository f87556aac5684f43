"""Passes over the data: running sums filled, saved as checkpoints, and resumed with less memory where it ran out."""
