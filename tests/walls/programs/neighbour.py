"""A job that keeps a secret in each kind of memory, waits for the attacks to end, and tells what it holds then.

python neighbour.py SECRET DONE     (it waits until DONE exists)
"""

# ruff: noqa: T201 - a program of its own, which speaks to its worker

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from worker.execution.ranks.rank_hub import RankHub

secret, done = sys.argv[1].encode(), Path(sys.argv[2])
libc = ctypes.CDLL(None)
kept = ctypes.create_string_buffer(secret)
posix = Path(f"/dev/shm/kronoscope-test-{os.getpid()}")
with os.fdopen(os.open(posix, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
    file.write(secret)
shm, sem, queue = libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)
libc.shmat.restype = ctypes.c_void_p
place = libc.shmat(shm, None, 0)
ctypes.memmove(place, secret, len(secret))
read, write = os.pipe()
os.set_blocking(read, False)
hub = RankHub(2, write)
facts = {
    "victim": os.getpid(),
    "victim_user": str(os.getuid()),
    "address": ctypes.addressof(kept),
    "posix": str(posix),
    "shm": shm,
    "sem": sem,
    "queue": queue,
}
print(json.dumps(facts), flush=True)
while not done.exists():
    time.sleep(0.05)
try:
    frames = os.read(read, 100).decode()
except BlockingIOError:
    frames = ""
found = {
    "kept": kept.value.decode(),
    "posix": posix.read_text(),
    "shm": ctypes.string_at(place, len(secret)).decode(),
    "frames": frames,
    "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "processors": len(os.sched_getaffinity(0)) == os.cpu_count(),
}
print(json.dumps(found), flush=True)
