"""The clock of this machine by which a lease ends here: monotonic, the same in every process, also counting suspension.

Standard library only: the guardian imports it.
"""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def node_seconds() -> float:
    """Return the seconds since this machine started; only differences of two of its own readings mean anything."""
    return time.clock_gettime(_CLOCK)
