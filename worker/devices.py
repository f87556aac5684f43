"""Devices of this worker: NVIDIA's GPUs, GPUs that are only a number of bytes, or the host itself; and their health.

A provider reads its devices anew at each call. NVIDIA's are read through its management library, which makes no
context on the GPU, so this process holds none of its memory; they are known by UUID, since their numbers differ
from process to process. A *fake* GPU is a capacity in bytes and computes on the CPU, held to that capacity: what is
leased, reserved and refused on a machine without a GPU is so by the same code. A host's memory is that of the
machine, or of the control group that bounds it.

A device that did not come up for a job, and a process that cannot be started at all, are no fault of the job's: it is
handed back, uncounted, for others to take. The worker offers such a device no more for some minutes, and takes nothing
for some seconds, ever longer, while nothing can be started.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import psutil
import pynvml

from catalog.cgroups import tightest_group
from jobs.devices.registry import Device

T = TypeVar("T")
Provider = Callable[[], tuple[Device, ...]]

_UUIDS = ("GPU-", "MIG-")
"""Prefixes of GPUs' UUIDs: `-1` is not the name of a GPU that has failed."""
_SLOT_BYTES = 4 * 2**30
"""Host memory of a job on a GPU: with less there is hardly room beside CUDA's libraries."""
_NODES = Path("/dev")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
WITHHELD_SECONDS = 300.0
"""How long a device is not offered that did not come up; then the next job tries it again."""
FIRST_REST_SECONDS = 5.0
"""How long nothing is taken after a process that could not be started; twice as long after each further one."""
LONGEST_REST_SECONDS = 60.0


def devices_of(node: str, fake_gpus: tuple[int, ...], environ: Mapping[str, str] = os.environ) -> Provider:
    """Return the provider of this machine's devices: fake GPUs of these bytes, else NVIDIA's, else the host's memory.

    It reads them anew at each call; of the environment's variables CUDA_VISIBLE_DEVICES counts.
    """
    if fake_gpus:
        made_up = tuple(fake_gpu(node, index, size) for index, size in enumerate(fake_gpus))
        return lambda: made_up
    if gpus_given(environ.get("CUDA_VISIBLE_DEVICES")):
        return lambda: nvidia_gpus(environ.get("CUDA_VISIBLE_DEVICES"))
    return lambda: (host(node),)


def usual_slots(node: str, fake_gpus: tuple[int, ...], environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of jobs at a time where the operator names none: one for each GPU, made-up ones too.

    At least 1, and no more than the host's memory has 4 GiB for each; 1 without a GPU.
    """
    if fake_gpus:
        return len(fake_gpus)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(nvidia_gpus(visible)) or gpus_given(visible)
    return max(1, min(gpus, host(node).capacity_bytes // _SLOT_BYTES))


def fake_gpu(node: str, index: int, capacity_bytes: int) -> Device:
    """Return a GPU that exists in the ledger alone."""
    digest = hashlib.sha256(f"{node} {index}".encode()).hexdigest()
    return Device(uuid=f"FAKE-{digest[:32]}", kind="fake", name=f"fake GPU {index}", capacity_bytes=capacity_bytes)


def host(node: str) -> Device:
    """Return the machine's memory as a device; inside a control group its capacity is the group's limit.

    The node's name is used where the kernel has no name for its present run.
    """
    group = tightest_group()
    memory = psutil.virtual_memory()
    limit = None if group is None else group.limit_bytes()
    free = None if group is None else group.free_bytes()
    shared_by = [boot_id() or node]
    capacity, left = memory.total, memory.available
    if group is not None and limit is not None and limit < memory.total:
        # processes of one group share its memory, however their containers are called
        shared_by.append(str(group.folder.stat().st_ino))
        capacity, left = limit, limit if free is None else min(free, memory.available)
    digest = hashlib.sha256(" ".join(shared_by).encode()).hexdigest()
    return Device(
        uuid=f"HOST-{digest[:32]}",
        kind="host",
        name="host memory",
        capacity_bytes=capacity,
        used_bytes=max(0, capacity - left),
    )


def process_space(node: str) -> str:
    """Return node, boot of the kernel and process namespace: where they are the same, so are process numbers."""
    try:
        namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        namespace = "?"
    return f"{node} {boot_id() or '?'} {namespace}"


def boot_id() -> str | None:
    """The kernel's name for its present run; None where it has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def gpus_given(visible: str | None) -> int:
    """Count the GPUs that this process has, also while none of them answers.

    One whose driver comes up after it, or whose GPUs have failed for now, would else compute on the host for ever.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        none = error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION)
        return 0 if none else _spoken_of(visible, len([*_NODES.glob("nvidia[0-9]*")]))
    try:
        numbers = range(pynvml.nvmlDeviceGetCount())
        answering = len([*_chosen([_told(pynvml.nvmlDeviceGetHandleByIndex, each) for each in numbers], visible)])
        if answering:
            return answering
        failed = len([number for number in numbers if _failed(number)])
        return min(failed, _spoken_of(visible, failed))
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def _spoken_of(visible: str | None, there: int) -> int:
    """How many GPUs CUDA_VISIBLE_DEVICES names, whether they answer or not; without it all that are ``there``."""
    if visible is None:
        return there
    words = (word.strip() for word in visible.split(","))
    return len([*takewhile(lambda word: word.isdecimal() or word.startswith(_UUIDS), words)])


def _failed(number: int) -> bool:
    """Whether it does not answer; one that the system keeps from this process is only none of its own."""
    try:
        pynvml.nvmlDeviceGetHandleByIndex(number)
    except pynvml.NVMLError as error:
        return bool(error.value != pynvml.NVML_ERROR_NO_PERMISSION)
    return False


def nvidia_gpus(visible: str | None) -> tuple[Device, ...]:
    """Read NVIDIA's GPUs, or the slices of those that are cut by MIG."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver, or none that answers
    try:
        gpus = [_told(pynvml.nvmlDeviceGetHandleByIndex, each) for each in range(pynvml.nvmlDeviceGetCount())]
        return tuple(read for handle in _chosen(gpus, visible) if (read := _told(_read, handle)) is not None)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _told(ask: Callable[..., T], *arguments: object) -> T | None:
    """None of a device that does not answer: it keeps its number, and the others are offered all the same."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return None


def _chosen(gpus: list[object | None], visible: str | None) -> Iterator[object]:
    parts = [[] if gpu is None else _parts(gpu) for gpu in gpus]
    if visible is None:
        for each in parts:
            yield from each
        return
    handles = [each for gpu, cut in zip(gpus, parts, strict=True) for each in (gpu, *cut)]
    by_uuid = {None if each is None else _told(pynvml.nvmlDeviceGetUUID, each): each for each in handles}
    named = {uuid: each for uuid, each in by_uuid.items() if uuid is not None}
    for word in visible.split(","):
        name = word.strip()
        if name.isdecimal() and int(name) < len(gpus):
            # CUDA would show nothing of what follows a GPU that failed; but a child is given one UUID, and may see it
            yield from parts[int(name)][:1]
            continue
        found = [] if name.isdecimal() else [each for uuid, each in named.items() if name and uuid.startswith(name)]
        if len(found) == 1:
            yield found[0]
        elif found or None not in by_uuid or not name.startswith(_UUIDS):
            return  # as CUDA does: what follows a name that fits none, or several, is not seen


def _parts(gpu: object) -> list[object]:
    """Return the devices that CUDA computes on: the GPU, or its slices (perhaps none yet) where it is to be cut."""
    try:
        if pynvml.nvmlDeviceGetMigMode(gpu)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return [gpu]
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except pynvml.NVMLError:
        return [gpu]  # one that cannot be cut
    slices = (_told(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, index) for index in range(count))
    return [each for each in slices if each is not None]


def _read(handle: object) -> Device:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return Device(
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        kind="cuda",
        name=str(pynvml.nvmlDeviceGetName(handle)),
        capacity_bytes=memory.total - memory.reserved,
        used_bytes=memory.used,
    )


class DeviceHealth:
    """The health of one worker process's devices, and whether it can start processes."""

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
