"""Predicting memory, planning with it, holding a budget."""
