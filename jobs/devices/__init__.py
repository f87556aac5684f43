"""Registered devices, and the leases of them that running jobs hold."""
