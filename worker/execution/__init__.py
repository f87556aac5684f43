"""The child process: the one room of the worker that imports torch, and never ``jobs``."""
