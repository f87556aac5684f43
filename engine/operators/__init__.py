"""Operators made of factors: products with damped inverses."""
