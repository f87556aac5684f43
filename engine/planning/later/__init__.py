"""Bytes and seconds of the analyses that use curvature as an operator, a file for each."""
