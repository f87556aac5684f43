"""Formulas of the analysis ``capacity``: per layer, for the model, over sample sizes, against the exact GGN."""
