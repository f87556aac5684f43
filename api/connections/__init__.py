"""Connections of clients: how many of each, how long each may be silent, and what ends them."""
