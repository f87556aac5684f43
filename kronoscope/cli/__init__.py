"""The command line: one module per group of commands."""

from kronoscope.cli.main import main

__all__ = ["main"]
