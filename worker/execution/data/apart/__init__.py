"""Processes apart, in which libraries read foreign files within limits of memory and time."""
