"""The package that users import: the client, the command line, and measurements in a notebook (`local`)."""

from kronoscope.client import Client

__all__ = ["Client"]
