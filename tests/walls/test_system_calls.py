"""The system calls of a job: those that computing needs, and no other."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from catalog.frames import LogLine
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement
from worker.process.system_calls import _ALLOWED, _CLONE, _DENIED, filter_program

TRIES = """
import ctypes, errno, json, os, platform, sys
from catalog.frames import LogLine, encode
libc = ctypes.CDLL(None, use_errno=True)
arm = platform.machine() == "aarch64"

def tried(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(each) for each in arguments])
    if result == 0 and number == (220 if arm else 56):
        os._exit(0)  # the child of a clone that was allowed
    return errno.errorcode.get(ctypes.get_errno(), "done")

clone = 220 if arm else 56
told = {f"clone {flag:#x}": tried(clone, flag | 17, 0, 0, 0, 0)
        for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)}
told |= {
    "clone3": tried(435, 0, 0),
    "unshare": tried(97 if arm else 272, 0x10000000),
    "ptrace": tried(117 if arm else 101, 16, os.getppid(), 0, 0),
    "io_uring_setup": tried(425, 1, 0),
    "io_uring_enter": tried(426, 0, 0, 0, 0, 0),
    "add_key": tried(217 if arm else 248, 0, 0, 0, 0, 0),
    "mount_setattr": tried(442, 0, 0, 0, 0, 0),
    "fanotify_init": tried(262 if arm else 300, 0, 0),
    "name_to_handle_at": tried(264 if arm else 303, 0, 0, 0, 0, 0),
    "syslog": tried(116 if arm else 103, 3, 0, 0),
    "a call that nobody knows": tried(1000),
}
import subprocess, threading, multiprocessing
seen = []
threads = [threading.Thread(target=seen.append, args=(each,)) for each in range(4)]
[each.start() for each in threads]; [each.join() for each in threads]
told["threads"] = len(seen)
told["program"] = subprocess.run(["true"]).returncode
with multiprocessing.get_context("fork").Pool(2) as pool:
    told["fork"] = pool.map(abs, [-1, -2])
os.write(int(sys.argv[-1]), encode(LogLine(level="info", message=json.dumps(told))))
"""


def run(program: str, *arguments: str) -> Any:
    environment = child_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, *arguments]
    child = Child.start({}, subprocess.DEVNULL, environment, command, Confinement())
    try:
        (frame,) = child.frames()
        assert isinstance(frame, LogLine)
        assert child.wait(240) == 0
        return json.loads(frame.message)
    finally:
        child.close()


def test_namespaces_and_unknown_calls_are_closed_and_programs_run() -> None:
    told = run(TRIES)
    assert {name: why for name, why in told.items() if name.startswith("clone ")}.keys() != set()
    assert {why for name, why in told.items() if name.startswith("clone ")} == {"EPERM"}
    for name in ("unshare", "ptrace", "io_uring_setup", "add_key"):
        assert told[name] == "EPERM", name
    for name in ("clone3", "io_uring_enter", "mount_setattr", "fanotify_init", "name_to_handle_at", "syslog"):
        assert told[name] == "ENOSYS", name
    assert told["a call that nobody knows"] == "ENOSYS"
    assert (told["threads"], told["program"], told["fork"]) == (4, 0, [1, 2])


COMPUTES = """
import json, os, sys, tempfile
import numpy, torch, torch.distributed
from multiprocessing import shared_memory
from catalog.frames import LogLine, encode
a = torch.randn(200, 200, dtype=torch.float64)
told = {"eigenvalues": len(torch.linalg.eigvalsh(a @ a.T))}
with tempfile.TemporaryDirectory() as folder:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    torch.distributed.all_reduce(a)
    numpy.save(folder + "/a.npy", a.numpy())
    told["mapped"] = list(numpy.load(folder + "/a.npy", mmap_mode="r").shape)
    torch.distributed.destroy_process_group()
block = shared_memory.SharedMemory(create=True, size=100)
block.close(); block.unlink()
loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, num_workers=1)
told["loaded"] = sum(len(each) for each in loader)
os.write(int(sys.argv[-1]), encode(LogLine(level="info", message=json.dumps(told))))
"""


def test_libraries_that_compute_run_behind_it() -> None:
    assert run(COMPUTES) == {"eigenvalues": 200, "mapped": [200, 200], "loaded": 8}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_tables_name_each_number_once(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    column = 1 if machine == "x86_64" else 2
    numbers = [entry.split(":")[column] for entry in (_ALLOWED + _DENIED).split()]
    known = [int(each) for each in numbers if each != "-"] + [_CLONE[machine]]
    assert len(known) == len(set(known))
    monkeypatch.setattr("platform.machine", lambda: machine)
    program = filter_program()
    assert program is not None
    assert program.length < 250
