"""Clients by their addresses; what bounds their connections is the proxy (`ops/nginx`)."""
