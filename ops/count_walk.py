"""Count what one measurement walks through: files of the project that it enters, calls, and changes of file.

    python ops/count_walk.py [CHECKOUT]

Counted is the second `kronoscope.local.measure` of a process, on a net of two layers and 16 examples. A call counts
where its function lies in one of the project's packages; a change of file is a call into another file than the
project's call before it. A reader who follows a measurement takes the same way.
"""

import json
import subprocess
import sys
from pathlib import Path

PACKAGES = ("api", "catalog", "engine", "jobs", "kronoscope", "migrations", "worker")
WALK = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from kronoscope.local import measure

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
data = [(torch.randn(16, 6), torch.randint(0, 5, (16,)))]
root, packages = Path.cwd(), set(sys.argv[1:])
ours, found = {}, {"calls": 0, "changes": 0}
files, last = set(), None

def package(path):
    try:
        parts = Path(path).relative_to(root).parts
    except ValueError:
        return None
    return parts[0] if parts[0] in packages else None

def follow(frame, event, _):
    global last
    if event != "call":
        return
    path = frame.f_code.co_filename
    if path not in ours:
        ours[path] = package(path)
    if ours[path] is None:
        return
    found["calls"] += 1
    files.add(path)
    if path != last:
        found["changes"] += 1
        last = path

measure(net, data, task="classification")
sys.setprofile(follow)
try:
    measure(net, data, task="classification")
finally:
    sys.setprofile(None)
found["files"] = len(files)
found["engine_files"] = sum(ours[each] == "engine" for each in files)
print(json.dumps(found))
"""


def count_walk(checkout: Path) -> dict[str, int]:
    """Return the number of files, of files of the engine, of calls and of changes of file.

    Args:
        checkout: A folder that holds the project.
    """
    command = [sys.executable, "-c", WALK, *PACKAGES]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)  # noqa: S603 - ours
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(count_walk(Path(sys.argv[1] if sys.argv[1:] else ".").resolve())))  # noqa: T201
