"""Cgroups, version 1 or 2: the kernel's limits on this process, and its use of memory.

A process is bound by its own group and by every group above it. What the kernel would take back before it
refuses (inactive file cache) counts as free. Read by the computing process, which must not exceed it, and by its
parent, which must tell a kill for want of memory from any other; so it stands where both can reach it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 2**60
"""The first version writes "none" as the largest multiple of a page."""


@dataclass(frozen=True)
class Group:
    """One control group, by its folder."""

    folder: Path
    version: int

    def limit_bytes(self) -> int | None:
        """Bytes that its processes may take together; None where it limits nothing."""
        limits = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        known = [limit for name in limits if (limit := _number(self.folder / name)) is not None and limit < _NO_LIMIT]
        return min(known, default=None)

    def free_bytes(self) -> int | None:
        """Return the bytes of its limit that may still be taken; None where it limits nothing."""
        limit = self.limit_bytes()
        used = _number(self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        if limit is None or used is None:
            return None
        cache = _entry(self.folder / "memory.stat", "inactive_file" if self.version == 2 else "total_inactive_file")
        return max(0, limit - used + (cache or 0))

    def oom_kills(self) -> int | None:
        """Processes that the kernel has killed in it for want of memory; None where it does not tell."""
        return _entry(self.folder / ("memory.events" if self.version == 2 else "memory.oom_control"), "oom_kill")


def memory_groups(root: Path = Path("/")) -> tuple[Group, ...]:
    """Find the groups that bind this process's memory, its own first; none if the kernel shows none.

    The root has `proc` and `sys`; another than `/` is for tests, here and below.
    """
    return _groups("memory", root)


def process_limit(root: Path = Path("/")) -> int | None:
    """Return the processes and threads that the groups of this process allow, together with all that run already.

    The least over all groups; None if no group limits them.
    """
    limits = (_number(group.folder / "pids.max") for group in _groups("pids", root))
    return min((limit for limit in limits if limit is not None), default=None)


def _groups(controller: str, root: Path) -> tuple[Group, ...]:
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ()
    found: list[Group] = []
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        for version, kind, wanted in ((2, "cgroup2", ""), (1, "cgroup", controller)):
            if (controllers == "") != (version == 2) or (version == 1 and wanted not in controllers.split(",")):
                continue
            for mounted, point in _mounts(mounts, kind, wanted):
                found += [Group(folder, version) for folder in _upwards(root / point.lstrip("/"), mounted, path)]
    return tuple(found)


def free_group_bytes(root: Path = Path("/")) -> int | None:
    """Return the fewest bytes that a group of this process leaves free; None if no group limits memory."""
    return min((free for group in memory_groups(root) if (free := group.free_bytes()) is not None), default=None)


def tightest_group(root: Path = Path("/")) -> Group | None:
    """Return the group of this process with the lowest limit; None if no group limits memory."""
    limited = [each for each in memory_groups(root) if each.limit_bytes() is not None]
    return min(limited, key=lambda each: each.limit_bytes() or 0, default=None)


def oom_kills(root: Path = Path("/")) -> int:
    """Count the processes of this process's own group that the kernel has killed for want of memory.

    It is 0 if the kernel shows no count.
    """
    groups = memory_groups(root)
    return sum(group.oom_kills() or 0 for group in groups[:1])


def _mounts(mounts: list[str], kind: str, controller: str) -> Iterator[tuple[str, str]]:
    """(root of the hierarchy, mount point) of every mount of that kind that has the controller."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, (filesystem, _, *options) = before.split(), after.split()
        if filesystem == kind and (not controller or controller in ",".join(options).split(",")):
            yield fields[3], fields[4]


def _upwards(point: Path, mounted: str, path: str) -> Iterator[Path]:
    """From the group's folder to the mount point; where it lies outside of what is mounted, that point alone."""
    # inside a container the path may be the host's, while only the container's own group is mounted
    inside = path.removeprefix(mounted.rstrip("/")) if path.startswith(mounted.rstrip("/")) else "/"
    folder = point / inside.lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = point
    while folder != point:
        yield folder
        folder = folder.parent
    yield point


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        # no such file, or `max`
        return None


def _entry(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)
