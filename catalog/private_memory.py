"""The memory and the environment of a service's process, closed to other processes of the same user.

``/proc/PID/environ`` of a worker holds its passwords, and code that a job brings may run as the worker's user. A
process that is not *dumpable* (prctl(2), PR_SET_DUMPABLE) has such files owned by root, can be traced only
with CAP_SYS_PTRACE, and leaves no core file. What it executes is dumpable again: each program hides itself.
"""

import ctypes

_PR_SET_DUMPABLE = 4  # linux/prctl.h


def hide_memory() -> bool:
    """Close this process's memory and environment to others of its user, and return whether the system did so.

    Only Linux can.
    """
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False
