"""Merging: sets of factors over disjoint examples become the set over all of them."""
