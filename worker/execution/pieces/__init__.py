"""Divided jobs seen from the child process: cutting the data, and joining what the pieces have computed."""
