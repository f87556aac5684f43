"""Bytes and seconds of every stage before anything large is allocated, and the choice among ways to run."""
