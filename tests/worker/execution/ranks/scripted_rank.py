"""The launcher with ranks that do what the assignment says, for tests of the launcher.

scripted_rank.py --frames FD      the launcher; `script` in the assignment has the steps of each rank
scripted_rank.py                  one rank
"""

import json
import os
import signal
import sys
import time

from catalog.frames import Failed, Finished, Stopped
from worker.execution.ranks.__main__ import main
from worker.execution.ranks.rank_link import RankPipe, connect, read_assignment_text

_EXIT_CODES = {"usage": 2, "transient": 3, "fatal": 4}


def step(pipe: RankPipe, name: str, value: object) -> int | None:
    """Do one thing; return the exit code where it is the last."""
    if name == "log":
        pipe.log("info", str(value))
    elif name == "torn":  # half a frame, as of a process that is killed while it writes
        os.write(pipe._descriptor, b'{"frame":"log","level":"info","mess')
    elif name == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif name == "sleep":
        time.sleep(float(str(value)))
    elif name == "kill_self":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "fail":
        frame = Failed(**{"category": "usage", "pointer": None, "layer": None, "detail": None, **dict(value)})  # type: ignore[call-overload]
        pipe.send(frame)
        return _EXIT_CODES[frame.category]
    elif name == "stoppable":
        asked: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        pipe.log("info", f"ready {os.getpid()}")
        while not asked:
            time.sleep(0.02)
        pipe.send(Stopped())
        return 5
    elif name == "finish":
        pipe.send(Finished(model_sha256=str(value)))
        return 0
    return None


def rank() -> int:
    """Follow the script of this rank."""
    pipe = connect(None)
    assert pipe is not None
    for name, value in json.loads(read_assignment_text())["script"][pipe.rank]:
        code = step(pipe, name, value)
        if code is not None:
            return code
    return 0


if __name__ == "__main__":
    if "--frames" in sys.argv:
        sys.exit(main(command=(sys.executable, "-P", __file__)))
    os._exit(rank())
