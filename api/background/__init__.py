"""Threads beside the requests: maintenance, cached metrics, and their exposition for Prometheus."""
