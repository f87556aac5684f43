"""Descriptors: the limit on open files of this process, of which every client's connection takes one."""

import resource

from jobs.errors import SettingsInvalid

BACKLOG = 512
"""Connections that the kernel accepts for the process, all of which may arrive in one turn of its loop."""
_OTHER_FILES = 128
"""Files and connections of the process itself: database, broker, artifacts that are being read."""


def require_descriptors(connections: int) -> None:
    """Raise the process's limit on open files to what so many connections of clients need.

    ``SettingsInvalid`` if the operating system's hard limit is lower.
    """
    needed = connections + BACKLOG + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SettingsInvalid(
            f"KRONOSCOPE_CONNECTIONS is {connections:,}, which takes {needed:,} open files, and this process may have "
            f"{hard:,}: raise its limit (ulimit -Hn, LimitNOFILE, --ulimit nofile), or lower KRONOSCOPE_CONNECTIONS"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
