"""The monitor of what an attempt has on the disk: a thread of its guardian that looks, and says when it is too much.

Counted are the blocks of all files of the job's user below the job's folder and in the places that everybody may write
to, and of files that its processes hold open, or mapped, without a name. Files of the service, to which a job's inputs
are second names, are not the job's. Where a job runs as the service's user, what was there before it does not count,
nor does whatever has several names.

A look takes time, and a job can make it take more: it is repeated only after 250 times what it took (4 times, while
room is short or a volume has lost what could be too much), and ends where more is found than an attempt may have.
Between two looks the monitor asks for the free space alone.

The thread comes to files as the job's user, so no folder that the job has closed to others is closed to it. One that it
cannot look into nevertheless was closed on purpose, and counts as beyond the limit.

Standard library only: the guardian imports it.
"""

import contextlib
import ctypes
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from worker.process.confinement import DiskLimit, Excess
from worker.process.process_group import descendants

_TICK_SECONDS = 0.5
_USUAL, _HURRIED = 250, 4
"""How many times longer than a look the time to the next one is."""
_FIRST_SECONDS = 1.0
_LAST_LOOK_SECONDS = 10.0
_BLOCK_BYTES = 512
_EVERYBODYS = ("/dev/shm", "/tmp", "/var/tmp")  # noqa: S108 - everybody's
_EVERYBODYS_ENTRIES = 10_000
"""Entries of such a place that are looked at: the others there are no fault of this job."""
_MOST_MAPPINGS = 2_000_000
_FOREIGN = 4
"""How many times more entries than its own files a job may have: its inputs are among them."""
_GONE = " (deleted)"
_KEPT_TENTHS = 0.1


class _Beyond(Exception):
    """The look ends, as it has found too much already."""

    def __init__(self, excess: Excess) -> None:
        super().__init__(excess.kind)
        self.excess = excess


class Volume:
    """A volume that an attempt writes to, and what was free there when it started."""

    def __init__(self, place: str, parts: int, floor_bytes: int = 0) -> None:
        status = os.statvfs(place)
        self.place = place
        room = max(0, status.f_bavail * status.f_frsize - floor_bytes)
        self._short_bytes = floor_bytes + int(room * _KEPT_TENTHS)
        self.part_bytes = int(room * (1 - _KEPT_TENTHS)) // parts
        """Bytes of it that each of the attempts may have while it is short of room."""
        self._seen = status

    def lost(self) -> tuple[int, int, bool]:
        """Return the bytes and files that became fewer since the last look, and whether it is short of room."""
        status = os.statvfs(self.place)
        free = status.f_bavail * status.f_frsize
        seen = self._seen.f_bavail * self._seen.f_frsize
        return seen - free, self._seen.f_favail - status.f_favail, free < self._short_bytes

    def looked_at(self) -> None:
        """Count losses from now on."""
        self._seen = os.statvfs(self.place)


@dataclass(kw_only=True)
class _Count:
    """The counts of one look so far."""

    limit: DiskLimit
    user: int | None
    bytes_by_volume: dict[int, int] = field(default_factory=dict)
    files: int = 0
    entries: int = 0
    inodes: set[tuple[int, int]] = field(default_factory=set)

    def add(self, device: int, status: os.stat_result) -> None:
        """Count a file, unless it is not the job's or was counted under another name."""
        if self.user is not None:
            if status.st_uid != self.user:
                return
        elif status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            return
        if status.st_nlink != 1 and not stat.S_ISDIR(status.st_mode):
            key = (status.st_dev, status.st_ino)
            if key in self.inodes:
                return
            self.inodes.add(key)
        self.files += 1
        self.add_bytes(device, status.st_blocks * _BLOCK_BYTES)
        if self.files > self.limit.total_files:
            self._end()

    def add_bytes(self, device: int, size: int) -> None:
        """Count bytes of one volume."""
        self.bytes_by_volume[device] = self.bytes_by_volume.get(device, 0) + size

    def pass_by(self) -> None:
        """Count an entry, whosever it is."""
        self.entries += 1
        if self.entries > _FOREIGN * self.limit.total_files:
            self._end()

    def _end(self) -> NoReturn:
        found = max(self.files, self.entries // _FOREIGN)
        raise _Beyond(Excess(kind="files", found=found, limit=self.limit.total_files, place=self.limit.folder))


@dataclass
class _Mappings:
    """How far into files without a name the processes' mappings reach."""

    lines: int = 0
    reaches: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """The volume and the bytes, by the file's device and inode."""


def _hidden(what: str) -> _Beyond:
    return _Beyond(Excess(kind="hidden", found=0, limit=0, place=what))


class DiskMonitor:
    """Looks at what an attempt has until it is too much, or the attempt has ended."""

    def __init__(self, limit: DiskLimit, user: int | None, report: int, exceeded: Callable[[], object]) -> None:
        """Note what is free before the attempt starts."""
        self._limit = limit
        self._user = user
        self._report = report
        self._exceeded = exceeded
        self._volumes: dict[int, Volume] = {
            Path(limit.folder).stat().st_dev: Volume(limit.folder, limit.parts, limit.floor_bytes)
        }
        self._everybodys: dict[str, int] = {}
        for place in _EVERYBODYS if user is not None else ():
            with contextlib.suppress(OSError):
                device = Path(place).stat().st_dev
                self._everybodys[place] = device
                if device not in self._volumes:
                    self._volumes[device] = Volume(place, limit.parts)
        self._folder_device = next(iter(self._volumes))
        self._before: dict[int, int] = {}
        self._unanswered: set[int] = set()
        self._cost = 0.0
        self._counted = _Count(limit=limit, user=user)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(os.getpid(),), name="disk", daemon=True)
        if user is None:
            with contextlib.suppress(_Beyond):
                before = _Count(limit=limit, user=None)
                self._walk(limit.folder, self._folder_device, before)
                self._before = before.bytes_by_volume

    def file_bytes(self) -> int:
        """Return the bytes that one file may have: no more than the attempt, or than all attempts together."""
        if self._limit.total_bytes is not None:
            return self._limit.total_bytes
        return self._volumes[self._folder_device].part_bytes * self._limit.parts

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def finish(self) -> None:
        """Look once more, now that nothing of the attempt runs, and end."""
        self._ended.set()
        self._thread.join(_LAST_LOOK_SECONDS)

    def _run(self, guardian: int) -> None:
        if self._user is not None:
            # for good, and for this thread alone
            libc = ctypes.CDLL(None)
            libc.setfsgid(self._user)
            libc.setfsuid(self._user)
        looked, ended = time.monotonic(), False
        while not ended:
            ended = self._ended.wait(_TICK_SECONDS)
            pause = _HURRIED * self._cost if self._is_urgent() else max(_FIRST_SECONDS, _USUAL * self._cost)
            if ended or time.monotonic() - looked >= pause:
                excess = self._look(None if ended else guardian)
                if excess is not None:
                    with contextlib.suppress(OSError):  # its reader may be gone
                        os.write(self._report, excess.as_bytes())
                    self._exceeded()
                    return
                looked = time.monotonic()

    def _is_urgent(self) -> bool:
        """Whether a volume is short of room, or has lost half of what the attempt may still take."""
        spare_files = self._limit.total_files - self._counted.files
        spare_bytes = None
        if self._limit.total_bytes is not None:
            spare_bytes = self._limit.total_bytes - sum(self._counted.bytes_by_volume.values())
        for volume in self._volumes.values():
            with contextlib.suppress(OSError):
                lost_bytes, lost_files, short = volume.lost()
                if short or 2 * lost_files > spare_files:
                    return True
                if spare_bytes is not None and 2 * lost_bytes > spare_bytes:
                    return True
        return False

    def _look(self, guardian: int | None) -> Excess | None:
        began = time.thread_time()
        for volume in self._volumes.values():
            with contextlib.suppress(OSError):
                volume.looked_at()
        count = _Count(limit=self._limit, user=self._user)
        try:
            self._walk(self._limit.folder, self._folder_device, count)
            for place, device in self._everybodys.items():
                self._visit(place, device, count)
            if guardian is not None:
                self._look_at_processes(guardian, count)
            self._judge(count)
        except _Beyond as beyond:
            return beyond.excess
        except OSError:  # the disk itself does not answer, which is the job's to meet
            return None
        self._counted = count
        self._cost = time.thread_time() - began
        return None

    def _judge(self, count: _Count) -> None:
        found = {device: max(0, size - self._before.get(device, 0)) for device, size in count.bytes_by_volume.items()}
        count.bytes_by_volume = found
        total, most = sum(found.values()), self._limit.total_bytes
        if most is not None:
            if total >= most:  # no file grows beyond it
                raise _Beyond(Excess(kind="bytes", found=total, limit=most, place=self._limit.folder))
            return
        for device, volume in self._volumes.items():
            size = found.get(device, 0)
            if size > volume.part_bytes and volume.lost()[2]:
                raise _Beyond(Excess(kind="room", found=size, limit=volume.part_bytes, place=volume.place))

    def _walk(self, top: str, device: int, count: _Count) -> None:
        """Count all that is below a folder."""
        left = [top]
        while left:
            for entry, status in self._entries(left.pop()):
                count.pass_by()
                count.add(device, status)
                if stat.S_ISDIR(status.st_mode):
                    left.append(entry)

    def _visit(self, place: str, device: int, count: _Count) -> None:
        """Count what is the job's in a place that everybody may write to."""
        with contextlib.suppress(PermissionError):
            for number, (entry, status) in enumerate(self._entries(place)):
                if number >= _EVERYBODYS_ENTRIES:
                    return
                if status.st_uid == self._user:
                    count.add(device, status)
                    if stat.S_ISDIR(status.st_mode):
                        self._walk(entry, device, count)

    def _entries(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # it is gone meanwhile
                        yield entry.path, entry.stat(follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if self._is_own(folder, error):
                raise _hidden(f"folder {Path(folder).name[:80]!a}") from error

    def _is_own(self, folder: str, error: OSError) -> bool:
        """Whether a folder that cannot be listed is one that the job has made."""
        try:
            return os.lstat(folder).st_uid == (os.getuid() if self._user is None else self._user)
        except FileNotFoundError:
            return False
        except OSError:
            return not isinstance(error, PermissionError)  # so deep that it has no path

    def _look_at_processes(self, guardian: int, count: _Count) -> None:
        """Count files without a name that a process has open or mapped."""
        mapped = _Mappings()
        unanswered = set()
        for pid in descendants(guardian):
            try:
                self._look_at_process(Path("/proc") / str(pid), count, mapped)
            except PermissionError:
                if _has_memory(pid):
                    unanswered.add(pid)
            except OSError:
                continue  # it has ended
        if hidden := unanswered & self._unanswered:
            raise _hidden(f"process {min(hidden)}")
        self._unanswered = unanswered
        for key, (device, size) in mapped.reaches.items():
            if key not in count.inodes:
                count.add_bytes(device, size)

    def _look_at_process(self, process: Path, count: _Count, mapped: "_Mappings") -> None:
        for link in (process / "fd").iterdir():
            count.pass_by()
            with contextlib.suppress(FileNotFoundError):
                self._open_file(link, count)
        with (process / "maps").open(errors="replace") as lines:
            for line in lines:
                mapped.lines += 1
                if line.endswith(f"{_GONE}\n"):
                    self._note_mapping(line, mapped)
        if mapped.lines > _MOST_MAPPINGS:
            raise _hidden(f"what its {mapped.lines:,} mappings hold")

    def _open_file(self, link: Path, count: _Count) -> None:
        try:
            target = str(link.readlink())
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            target = _GONE  # so deep that it has no path
        if target.endswith(_GONE):
            status = link.stat()
            device = self._device_of(target, status.st_dev)
            if device is not None and status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                count.add(device, status)

    def _note_mapping(self, line: str, mapped: "_Mappings") -> None:
        """Note how far into a file a mapping reaches: its blocks cannot be asked for without a descriptor."""
        span, _, offset, numbers, inode, path = line.split(maxsplit=5)
        major, _, minor = numbers.partition(":")
        key = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
        device = self._device_of(path, key[0])
        if device is not None:
            first, _, end = span.partition("-")
            reach = int(offset, 16) + int(end, 16) - int(first, 16)
            mapped.reaches[key] = (device, max(reach, mapped.reaches.get(key, (device, 0))[1]))

    def _device_of(self, path: str, device: int) -> int | None:
        """The volume of a file without a name; None for one of another volume, memory without a file among them.

        A job in a mount namespace may have other paths, and some file systems another number for each file.
        """
        if path.startswith(f"{self._limit.folder}/"):
            return self._folder_device
        for place, its_device in self._everybodys.items():
            if path.startswith(f"{place}/"):
                return its_device
        return device if device in self._volumes else None


def _has_memory(pid: int) -> bool:
    """Whether a process still runs: one that ends has no memory before it has no files, and cannot be looked into."""
    try:
        return Path(f"/proc/{pid}/statm").read_text().split()[0] != "0"
    except (OSError, IndexError):
        return False
