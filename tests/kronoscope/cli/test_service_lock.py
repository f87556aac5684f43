"""The lock of a service's folder: refused while its first process lives, waited for while only others do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kronoscope.cli.service_lock import FolderInUse, ServiceLock

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from kronoscope.cli.service_lock import ServiceLock
lock = ServiceLock(Path(sys.argv[1]))
lock.write("http://127.0.0.1:8000")
subprocess.Popen(["sleep", sys.argv[2]], pass_fds=(lock.descriptor,), stdout=subprocess.DEVNULL)
print("held", flush=True)
time.sleep(600)
"""


def held(folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    """A process that holds the lock, and has started another that does so for some seconds."""
    process = subprocess.Popen([sys.executable, "-P", "-c", HOLDER, folder, str(seconds)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_lock_is_refused_while_its_first_process_lives_and_waited_for_once_it_was_killed(tmp_path: Path) -> None:
    first = held(tmp_path, 1.5)
    with pytest.raises(FolderInUse) as refused:
        ServiceLock(tmp_path)
    assert f"{tmp_path} is in use by the service at http://127.0.0.1:8000 (process {first.pid});" in str(refused.value)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    began = time.monotonic()
    lock = ServiceLock(tmp_path)
    assert time.monotonic() - began < 10
    with pytest.raises(FolderInUse, match="another service that is starting"):
        ServiceLock(tmp_path)
    lock.close()
    ServiceLock(tmp_path).close()


def test_a_lock_that_outlives_its_first_process_for_long_is_refused_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kronoscope.cli.service_lock.LEAVE_SECONDS", 0.3)
    first = held(tmp_path, 3)
    first.kill()
    first.communicate(timeout=60)
    with pytest.raises(FolderInUse, match=r"the service at http://127\.0\.0\.1:8000"):
        ServiceLock(tmp_path)
