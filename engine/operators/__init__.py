"""What is computed with factors: products with damped inverses."""
