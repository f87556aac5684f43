"""The decision how many machines of which class to start, from the demand, the machines that run, and the limits.

Waiting jobs are put, the largest first, on the smallest *room* that takes them: a free device of a present worker, or
one of a machine that is on its way. For those that are left a machine of the first class that can take them is opened,
whose other devices take further jobs, until the class is at its ceiling::

    machines to start = min(ceiling - machines there, what the jobs need)        0 within the cool-down

So a job is never counted for two machines, and a machine that is still in the launcher's queue is never asked for
again. Of a class whose starts fail, the cool-down doubles with each failure in a row, up to an hour.

References:
    Johnson (1973), Near-optimal bin packing algorithms: best fit decreasing
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from catalog.record import record
from jobs.autoscale.classes import MachineClass
from jobs.devices.requirements import device_class
from jobs.scheduling.waiting_reason import readable

_LONGEST_COOLDOWN_SECONDS = 3600.0


@record
class WaitingJobs:
    """Jobs that could be claimed now, and need the same."""

    needs_bytes: int
    """On each device that a job computes on; 0 where it is not known yet."""
    device_class: str | None
    """`cuda` or `cpu` for a job whose first attempt has computed on such a device."""
    world_size: int
    factories: tuple[str, ...]
    count: int
    example: str
    """The id of the one that waits longest."""


@dataclass(kw_only=True)
class Room:
    """Devices of one machine that waiting jobs may be put on; the jobs are subtracted from it."""

    kind: str
    """`cuda`, `fake` or `host`."""
    device_bytes: int
    """Bytes that one job may have of a device; where `shared`, those that all of them may have together."""
    devices: int
    """Devices of the machine: as many as one job can have. On a host its ranks share the one device."""
    slots: int
    """Jobs that it still takes."""
    units: int
    """Devices that it still has for them; a device counts once for each job that it is worth."""
    factories: tuple[str, ...]
    shared: bool = False

    def takes(self, job: WaitingJobs) -> bool:
        """Return whether one of the jobs may be put here."""
        return (
            self.slots >= 1
            and self._bytes(job) <= self.device_bytes
            and (self.kind == "host" or job.world_size <= min(self.devices, self.units))
            and job.device_class in (None, device_class(self.kind))
            and _lists(self.factories, job)
        )

    def put(self, job: WaitingJobs) -> None:
        """Subtract one of the jobs."""
        self.slots -= 1
        self.units -= job.world_size
        if self.shared:
            self.device_bytes -= self._bytes(job)

    def _bytes(self, job: WaitingJobs) -> int:
        return job.needs_bytes * (job.world_size if self.kind == "host" else 1)


@record
class ClassState:
    """A class, and the machines of it."""

    machine_class: MachineClass
    outstanding: int
    """Machines that were asked for, wait in the launcher's queue, or are there."""
    wait_seconds: float
    """Seconds left of its cool-down."""


@record
class Start:
    """Machines to start."""

    name: str
    machines: int
    jobs: int
    """Waiting jobs that they are for."""
    why: str


@record
class Refusal:
    """Waiting jobs for which no machine is started."""

    name: str | None
    """The class that they wait for; None where no class can take them."""
    jobs: int
    example: str
    why: str


@record
class Decision:
    """The machines to start, and why no more."""

    waiting: int
    covered: int
    """Waiting jobs that present workers and coming machines take."""
    starts: tuple[Start, ...]
    refusals: tuple[Refusal, ...]


def decide(waiting: Sequence[WaitingJobs], rooms: Iterable[Room], classes: Sequence[ClassState]) -> Decision:
    """Decide what to start."""
    here = sorted(rooms, key=lambda room: (room.kind == "host", room.device_bytes))
    opened = [_Opening(state) for state in classes]
    refusals: list[Refusal] = []
    covered = 0
    for job in sorted(waiting, key=lambda job: (-job.world_size, -job.needs_bytes)):
        left = job.count
        while left and (room := next((each for each in here if each.takes(job)), None)):
            room.put(job)
            covered += 1
            left -= 1
        if not left:
            continue
        chosen = next((each for each in opened if room_of(each.state.machine_class).takes(job)), None)
        if chosen is None:
            refusals.append(Refusal(name=None, jobs=left, example=job.example, why=_unmatched(job, classes)))
            continue
        turned_away = chosen.take(job, left)
        if turned_away:
            why = chosen.refusal()
            refusals.append(Refusal(name=chosen.name, jobs=turned_away, example=job.example, why=why))
    return Decision(
        waiting=sum(job.count for job in waiting),
        covered=covered,
        starts=tuple(each.start() for each in opened if each.rooms),
        refusals=tuple(refusals),
    )


def cooldown_left(cooldown_seconds: float, failures: int, since_start_seconds: float | None) -> float:
    """Return how long no machine of a class is to be started."""
    if since_start_seconds is None:
        return 0.0
    longest = max(_LONGEST_COOLDOWN_SECONDS, cooldown_seconds)
    # the first failure doubles it, and no exponent overflows
    whole = min(longest, cooldown_seconds * 2.0 ** min(failures, 30))
    return max(0.0, whole - since_start_seconds)


class _Opening:
    """The machines of one class that are opened for jobs."""

    def __init__(self, state: ClassState) -> None:
        self.state = state
        self.name = state.machine_class.name
        self.rooms: list[Room] = []
        self._jobs = 0
        self._most_bytes = 0

    def take(self, job: WaitingJobs, count: int) -> int:
        """Take as many of the jobs as may be; return how many may not."""
        for taken in range(count):
            room = next((each for each in self.rooms if each.takes(job)), None)
            if room is None:
                if self.state.wait_seconds > 0 or self._machines() >= self.state.machine_class.ceiling:
                    return count - taken
                room = room_of(self.state.machine_class)
                self.rooms.append(room)
            room.put(job)
            self._jobs += 1
            self._most_bytes = max(self._most_bytes, job.needs_bytes)
        return 0

    def start(self) -> Start:
        ceiling = self.state.machine_class.ceiling
        needs = f", needing up to {readable(self._most_bytes)} each" if self._most_bytes else ""
        why = (
            f"{_number(self._jobs, 'job')} {'waits' if self._jobs == 1 else 'wait'} for it{needs}; "
            f"{self.state.outstanding} of at most {ceiling} machines are there or on their way"
        )
        return Start(name=self.name, machines=len(self.rooms), jobs=self._jobs, why=why)

    def refusal(self) -> str:
        chosen = self.state.machine_class
        if self._machines() >= chosen.ceiling:
            return f"the class is at its ceiling of {_number(chosen.ceiling, 'machine')}"
        return f"its cool-down lasts for {self.state.wait_seconds:.0f} s yet"

    def _machines(self) -> int:
        return self.state.outstanding + len(self.rooms)


def room_of(offered: MachineClass | Row[Any]) -> Room:
    """Return the room on a machine of a class, or of a class's row in the ledger, that no job is on."""
    worth = offered.devices * offered.jobs_per_device
    return Room(
        kind=offered.kind,
        device_bytes=offered.device_bytes,
        devices=offered.devices,
        slots=worth,
        units=worth,
        factories=tuple(offered.factories),
    )


def _unmatched(job: WaitingJobs, classes: Sequence[ClassState]) -> str:
    """The requirement that no class meets."""
    known = [state.machine_class for state in classes]
    able = [each for each in known if job.device_class in (None, device_class(each.kind))]
    if not able:
        return f"its first attempt computed on a device of class `{job.device_class}`, and no class has such"
    listed = [each for each in able if _lists(each.factories, job)]
    if not listed:
        return f"no class lists {' and '.join(f'`{name}`' for name in job.factories)}"
    wide = [each for each in listed if each.kind == "host" or each.devices >= job.world_size]
    if not wide:
        widest = max(listed, key=lambda each: each.devices)
        return f"needs {job.world_size} devices of one machine; class {widest.name} has the most, {widest.devices}"
    largest = max(wide, key=lambda each: each.device_bytes)
    ranks = f" for each of {job.world_size} ranks" if job.world_size > 1 else ""
    return (
        f"needs {readable(job.needs_bytes)}{ranks}; class {largest.name} has the most of those that could take it, "
        f"{readable(largest.device_bytes)}"
    )


def _lists(factories: Sequence[str], job: WaitingJobs) -> bool:
    return "*" in factories or set(job.factories) <= set(factories)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
