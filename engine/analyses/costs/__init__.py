"""Costs: the bytes and seconds of each analysis in the plan, from shapes alone."""
