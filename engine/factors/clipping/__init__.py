"""Clipped factors: eigenvalues raised to a floor that bounds the condition, and what is made of them."""
