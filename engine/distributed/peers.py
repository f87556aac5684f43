"""Peers of this process on its own machine: whose process stands at the other end of each of its connections.

gloo asks no peer who it is, and its ports are open to every user of the machine. So after ranks have connected, each
looks at the kernel's table of connections, which tells the user of either end.
"""

import contextlib
import os
import time
from pathlib import Path

_TABLES = ("tcp", "tcp6")
_ESTABLISHED = "01"
_NOBODY = "0"
"""The inode of an end that no process has taken from its listener yet; the table gives it no user."""
_TAKEN_SECONDS = 2.0


def foreign_peers(earlier: frozenset[str] = frozenset()) -> list[str]:
    """Return who, other than this process's user, stands at the other end of a connection on this machine."""
    until = time.monotonic() + _TAKEN_SECONDS
    while True:
        own, rows = own_sockets() - earlier, _connections()
        ends = {(local, remote): (user, inode) for local, remote, user, inode in rows}
        met = {ends[remote, local] for local, remote, _, inode in rows if inode in own and (remote, local) in ends}
        waits = any(inode == _NOBODY for _, inode in met)
        if not waits or time.monotonic() > until:
            break
        time.sleep(0.01)
    foreign = {f"user {user}" for user, inode in met if inode != _NOBODY and user != os.getuid()}
    return sorted(foreign) + ["somebody who does not take the connection"] * waits


def own_sockets() -> frozenset[str]:
    """Return the inodes of this process's sockets."""
    found = set()
    with contextlib.suppress(OSError):
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(each.readlink()).removeprefix("socket:[").removesuffix("]"))
    return frozenset(found)


def _connections() -> list[tuple[str, str, int, str]]:
    """Local and remote address, user and inode of each connection of this network namespace (proc(5))."""
    found = []
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    found.append((fields[1], fields[2], int(fields[7]), fields[9]))
    return found
