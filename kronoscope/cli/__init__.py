"""The command line: one module per group of commands.

A command's docstring is the help text that users read, and each of its arguments has a help text of its own, so the
docstrings of commands have no sections.
"""

from kronoscope.cli.main import main

__all__ = ["main"]
