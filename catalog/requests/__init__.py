"""Requests: the job document and the blocks that all analyses share."""
