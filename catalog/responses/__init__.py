"""Responses: what the service says of a job, its layers and its devices."""
