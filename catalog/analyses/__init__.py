"""Analyses: one file a kind with its options, what one layer returns and what the whole model does."""
