"""Template: a process that has imported what programs of this project need, and forks them.

    python -P -m tests.machine.template LINK PADDING

LINK is the number of a socket over which a process that runs tests asks; when that process has ended, so does this one.
PADDING leaves room for the command lines of the programs.
"""

import gc
import os
import socket
import sys

from tests.machine.template.imports import import_all
from tests.machine.template.pages import enlarge
from tests.machine.template.spawning import serve


def main() -> None:
    """Import, say so, and fork what is asked for."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    gc.disable()  # modules that are loaded are no garbage
    import_all()
    gc.freeze()
    gc.enable()
    enlarge()
    link.send(b"ready")
    serve(link)
    os._exit(0)


if __name__ == "__main__":
    main()
