"""What a child may do to its worker, and to the machine: every test is a child that tries."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import LogLine
from worker.agent.isolation import measure_isolation
from worker.agent.isolation_probe import WALLS
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement

pytestmark = pytest.mark.real_programs

CANARY = "canary-of-the-database-password"
OTHER_USER = 54_321

ATTACK = """
import json, os, sys
from pathlib import Path
from catalog.frames import LogLine, encode

def read(path):
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError as error:
        return type(error).__name__

guardian = os.getppid()
worker = int(Path(f"/proc/{guardian}/stat").read_text().rpartition(")")[2].split()[1])
stolen = {name: read(Path(f"/proc/{pid}/{kind}"))
          for name, pid, kind in [("worker's environment", worker, "environ"), ("guardian's memory", guardian, "maps")]}
os.write(int(sys.argv[-1]), encode(LogLine(level="info", message=json.dumps(stolen))))
"""

# a worker, which starts the attack as its child; `hidden` is what the services do when they start
WORKER = """
import json, os, subprocess, sys
from catalog.private_memory import hide_memory
from worker.process.child_process import Child, child_environment
if json.loads(sys.argv[1]):
    hide_memory()
child = Child.start({}, subprocess.DEVNULL, child_environment(os.environ), [sys.executable, "-P", "-c", sys.argv[2]])
print(next(child.frames()).message)
child.close()
"""


def without_capabilities() -> None:
    """As any user's process: root's right to trace everything would prove nothing."""
    for capability in range(64):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def attack(hidden: bool) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", WORKER, json.dumps(hidden), ATTACK],
        env=os.environ | {"KRONOSCOPE_DATABASE_URL": CANARY},
        preexec_fn=without_capabilities,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    stolen: dict[str, str] = json.loads(done.stdout)
    return stolen


def test_a_child_cannot_read_the_environment_of_its_worker() -> None:
    assert CANARY in attack(hidden=False)["worker's environment"]  # so the attack is one
    assert attack(hidden=True) == {"worker's environment": "PermissionError", "guardian's memory": "PermissionError"}


PROGRAM = """
import ctypes, errno, json, os, resource, sys
from catalog.frames import LogLine, encode
libc = ctypes.CDLL(None, use_errno=True)

def refused(call, *arguments):
    return call(*arguments) == -1 and errno.errorcode[ctypes.get_errno()]

with open(sys.argv[1], "wb") as file:
    try:
        os.posix_fallocate(file.fileno(), 0, 2**21)
        too_large = "written"
    except OSError as error:
        too_large = errno.errorcode[error.errno]
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
told = {
    "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)],
    "too large": too_large,
    "ptrace": refused(libc.ptrace, 16, os.getppid(), 0, 0),
    "unshare": refused(libc.unshare, 0x10000000),
    "mount": refused(libc.mount, b"none", b"/", b"tmpfs", 0, None),
    "no new privileges": status["NoNewPrivs"].strip(),
    "user": os.getuid(),
    "groups": os.getgroups(),
    "capabilities": {status[each].strip() for each in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16},
}
os.write(int(sys.argv[-1]), encode(LogLine(level="info", message=json.dumps(told))))
"""


def told(confinement: Confinement, folder: Path, executable: str = sys.executable) -> dict[str, Any]:
    command = [executable, "-c", PROGRAM, str(folder / "large")]
    environment = child_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = Child.start({}, subprocess.DEVNULL, environment, command, confinement)
    try:
        (frame,) = child.frames()
        assert isinstance(frame, LogLine)
        assert child.wait(240) == 0
        seen: dict[str, Any] = json.loads(frame.message)
        return seen
    finally:
        child.close()


def test_a_child_is_held_to_its_limits_and_to_the_calls_that_it_needs(tmp_path: Path) -> None:
    seen = told(Confinement(files=100, file_bytes=2**20), tmp_path)
    assert seen["limits"] == [[0, 0], [100, 100]]
    assert seen["too large"] == "EFBIG"
    assert (seen["ptrace"], seen["unshare"], seen["mount"]) == ("EPERM", "EPERM", "EPERM")
    assert seen["no new privileges"] == "1"
    assert seen["user"] == os.getuid()


def test_a_hard_limit_below_the_one_that_was_asked_for_stays(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "from tests.worker.process.test_confinement import Confinement, told;"
        "print(told(Confinement(), Path(sys.argv[1]))['limits'][1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "[64, 64]\n"


def test_what_holds_is_measured_by_a_child_that_tries(tmp_path: Path) -> None:
    secret = tmp_path / "redis"
    secret.write_text("x")
    held = measure_isolation(Confinement(), os.environ | {"KRONOSCOPE_REDIS_URL_FILE": str(secret)}, tmp_path)
    assert set(held) <= set(WALLS)
    assert {"no_new_privileges", "system_calls"} <= set(held)
    assert "own_user" not in held
    assert "secret_files" not in held  # its own user's file, whatever its mode


def test_a_user_that_no_process_can_be_started_as_is_refused(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from worker.process.confinement import Confinement;"
        "from worker.agent.isolation import measure_isolation;"
        "measure_isolation(Confinement(user=54321), os.environ, Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path)],
        preexec_fn=without_capabilities,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "SettingsInvalid: KRONOSCOPE_CHILD_USER is 54321, and no process could be started" in done.stderr


@pytest.mark.skipif(
    os.getuid() != 0, reason="only root may start a process of another user; Compose's test does it too"
)
def test_a_child_of_another_user_has_no_capability_and_can_be_ended() -> None:
    # a program that everybody may execute stands in for the image's interpreter
    command = ["/bin/sh", "-c", "id -u; id -G; exec sleep 600"]
    child = Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, command, Confinement(user=OTHER_USER))
    try:
        output = child.output(1000)
        assert [next(output), next(output)] == [f"{OTHER_USER}\n".encode()] * 2
        descendants = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        status = Path(f"/proc/{descendants[0]}/status").read_text()
        assert [line.split()[1] for line in status.splitlines() if line.startswith(("CapPrm", "CapEff", "CapAmb"))] == [
            "0" * 16
        ] * 3
        child.kill()
        assert child.wait(240) == 128 + 9
    finally:
        child.close()
