"""Conformance: one table through which any curvature library can be run, ours included."""
