"""The outputs of the command line: results on standard output, everything else on standard error."""

import json
import sys
from typing import Any

from rich.console import Console


def result_console() -> Console:
    """Return the console for results, 100 columns wide where it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=100)


def message_console() -> Console:
    """Return the console for progress and messages."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:  # noqa: ANN401 - any JSON
    """Print a value for programs.

    Args:
        value: Anything that JSON holds.
    """
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
