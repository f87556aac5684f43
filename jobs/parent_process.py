"""The parent process of a service that was started as several processes: each of them ends soon after it.

However the parent ended, its number is no longer that of this process's parent. A signal of the parent's own
(PR_SET_PDEATHSIG) would need Linux, and be lost where the parent ends before it is asked for.
"""

import os
import signal
import threading
import time

_POLL_SECONDS = 0.5
GRACE_SECONDS = 6.0
"""From SIGTERM to the end by force: with it all of a service has ended within 10 s of its first process."""


def end_with_parent(parent: int) -> None:
    """End this process once its parent, of that number, has ended: by SIGTERM, by force where that takes too long."""
    threading.Thread(target=_end_with, args=(parent,), name="parent process", daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
