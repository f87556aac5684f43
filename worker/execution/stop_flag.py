"""The flag that a signal raises and the computation reads between units of work."""

import signal
from types import FrameType

from engine.errors import StopRequested


class StopFlag:
    """A flag that SIGTERM sets, and that the computation reads before each unit of work."""

    def __init__(self) -> None:
        self._asked = False

    def install(self) -> None:
        """Handle SIGTERM, and ignore SIGINT: an interrupt from the keyboard is handled by the parent."""
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked = True

    def checkpoint(self) -> None:
        """Stop here if a signal has asked for it."""
        if self._asked:
            raise StopRequested
