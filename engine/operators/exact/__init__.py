"""Exact curvature by its products: tangents beside a forward pass, attention with all its derivatives, passes."""
