"""The health of a worker's devices: which did not come up for a job, and whether processes can be started at all.

Neither is a job's fault, so no job pays for it: it is handed back, uncounted, for others to take. The worker offers
such a device no more for some minutes, and takes nothing for some seconds, ever longer, while nothing can be started.
"""

import threading
import time
from collections.abc import Callable, Sequence

from jobs.devices.registry import Device

WITHHELD_SECONDS = 300.0
"""How long a device is not offered that did not come up; then the next job tries it again."""
FIRST_REST_SECONDS = 5.0
"""How long nothing is taken after a process that could not be started; twice as long after each further one."""
LONGEST_REST_SECONDS = 60.0


class DeviceHealth:
    """One per worker process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._withheld: dict[str, float] = {}
        self._rests = 0
        self._rested_at = clock()

    def withhold(self, uuid: str) -> float:
        """Stop offering a device for a while; return the seconds until it is offered again."""
        with self._lock:
            self._withheld[uuid] = self._clock() + WITHHELD_SECONDS
        return WITHHELD_SECONDS

    def withheld(self) -> set[str]:
        """Return the devices that are not offered at the moment."""
        now = self._clock()
        with self._lock:
            self._withheld = {uuid: until for uuid, until in self._withheld.items() if until > now}
            return set(self._withheld)

    def well(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return the devices that are not withheld, in the same order."""
        withheld = self.withheld()
        return tuple(each for each in devices if each.uuid not in withheld)

    def not_started(self) -> float:
        """A process could not be started: rest. Returns for how long; what fails during a rest makes it no longer."""
        with self._lock:
            now = self._clock()
            if now >= self._rested_at:
                self._rested_at = now + min(FIRST_REST_SECONDS * 2**self._rests, LONGEST_REST_SECONDS)
                self._rests = min(self._rests + 1, 16)
            return self._rested_at - now

    def started(self) -> None:
        """A process was started and has spoken: all is well."""
        with self._lock:
            self._rests = 0

    def resting(self) -> bool:
        """Whether no job is to be taken now."""
        with self._lock:
            return self._clock() < self._rested_at
