"""Processes: the child, its guardian, their pipes, and what the end of one means."""
