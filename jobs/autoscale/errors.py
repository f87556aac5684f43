"""Errors of the autoscaler, sorted as those of the ledger (`jobs.errors`) by who must act.

::

    ClassesInvalid    (usage)      the file of machine classes: mend it
    LauncherMissing   (fatal)      the launcher's program is not installed here
    LauncherFailed    (transient)  the launcher refused, or did not answer: tried again after the cool-down
"""

from jobs.errors import FatalError, TransientError, UsageError


class ClassesInvalid(UsageError):
    """The file of machine classes cannot be read, or a field of it makes no sense."""


class LauncherMissing(FatalError):
    """A program that the launcher consists of is not installed on this machine."""


class LauncherFailed(TransientError):
    """The launcher refused to start or to list machines, or did not answer in time."""
