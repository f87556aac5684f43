"""What people import and type: the client, the command line, and a door to the engine for notebooks."""

from kronoscope.client import Client

__all__ = ["Client"]
