"""A child that computes nothing and starts in a moment: it does what the document's script says.

    "model": {"source": "factory", "factory": "kronoscope_quick:make", "kwargs": {"script": [["layer", 0], ["finish"]]}}

For faults that need a hundred jobs rather than a network; the steps are those of
``tests/worker/scripted_child.py``, and `murder`, which kills the worker with signal 9, and `at`.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.worker.scripted_child import Script

SCRIPT = [["started"], ["layer", 0], ["layer", 1], ["summary"], ["finish"]]


class QuickScript(Script):
    def at(self, index: int, *steps: Any) -> None:
        """What the piece of this number does, among the steps of all pieces."""
        if self.assignment["piece"]["index"] == index:
            for name, *arguments in steps:
                getattr(self, name)(*arguments)

    def murder(self) -> None:
        guardian = os.getppid()
        os.kill(_parent(guardian), signal.SIGKILL)
        time.sleep(60)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    script = QuickScript(int(sys.argv[sys.argv.index("--frames") + 1]))
    script.read()
    for name, *arguments in script.assignment["document"]["model"]["kwargs"].get("script", SCRIPT):
        getattr(script, name)(*arguments)
