"""Targets: which dimension of the outputs they are classes of, and what they say of each loss term."""
