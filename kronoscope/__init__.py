"""The package that users import: the client, the command line, and measurements in a notebook (`local`)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kronoscope.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    """Import the client where it is asked for; a job's processes import this package too and need none of it.

    Raises:
        AttributeError: Nothing has this name here.
    """
    if name == "Client":
        return importlib.import_module("kronoscope.client").Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
