"""Types of layers that have Kronecker factors, one module each, and the rule for coverage."""
