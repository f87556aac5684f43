"""The command line: one module per group of commands.

A command's docstring is the help text that users read, and each of its arguments has a help text of its own, so the
docstrings of commands have no sections.
"""

try:
    from kronoscope.cli.main import main
except KeyboardInterrupt:
    raise SystemExit(130) from None  # ctrl-C while modules load

__all__ = ["main"]
