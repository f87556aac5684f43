"""The embedded worker, without Celery: the same Agent, fed by its own poll of the database.

    python -P -m worker.embedded [--with-parent PID] [--until-idle] [--wall 4h] [--drain-before 10m]

SIGTERM or SIGINT hands running jobs back and ends it; ``--with-parent`` does so too when the process
that started it has ended (`jobs.parent_process`). The others are what `worker.lifetime` says.
"""

import gc

gc.disable()  # modules that are loaded are no garbage: to look for some takes a seventh of the start

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence

from jobs.errors import LedgerError
from jobs.parent_process import end_with_parent
from worker.service import Service
from worker.settings import WorkerSettings

gc.freeze()
gc.enable()

_LOOK_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the worker until it is asked to stop."""
    parser = argparse.ArgumentParser(prog="worker.embedded")
    parser.add_argument("--with-parent", type=int, metavar="PID", help="end when the starting process ends")
    parser.add_argument("--until-idle", action="store_const", const="1", help="end when nothing is left to do")
    parser.add_argument("--wall", help="when the machine is taken away, from now on, such as 4h")
    parser.add_argument("--drain-before", help="how long before that it has ended, such as 10m")
    options = parser.parse_args(arguments)
    named = {name: getattr(options, name) for name in ("until_idle", "wall", "drain_before")}
    given = {f"KRONOSCOPE_{name.upper()}": text for name, text in named.items() if text is not None}
    told, tell = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(tell, b"!"))
    if options.with_parent is not None:
        end_with_parent(options.with_parent)
    try:
        service = Service(WorkerSettings.from_environment({**os.environ, **given}, poll_seconds=1))
    except LedgerError as error:
        sys.stderr.write(f"the worker does not start: {error}\n")
        return 2
    service.start()
    while not select.select([told], [], [], _LOOK_SECONDS)[0]:
        pass  # a signal that another thread receives wakes no select: its handler runs now
    service.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
