"""Semiseparable matrices: tridiagonal plus low rank, and block SSS, with their fits, in O(N log N) numbers."""
