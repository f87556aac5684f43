"""Collection over several ranks: what they agree on, and how their sums become those of all data."""
