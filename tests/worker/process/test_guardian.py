"""The guardian: whatever happens to the parent, nothing of the job lives on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from worker.process.guardian import MOMENT, node_seconds

pytestmark = pytest.mark.real_programs

PARENT = """
import json, os, subprocess, sys, time
from worker.process.child_process import Child
child = Child.start({}, subprocess.DEVNULL, os.environ, json.loads(sys.argv[1]))
frame = next(child.frames())
print(json.dumps([child.pid, *json.loads(frame.message)]), flush=True)
time.sleep(600)
"""


@pytest.fixture
def guarded() -> Iterator[Any]:
    """Start a guardian directly; its lifeline's other end is ours."""
    started = []

    def start(*command: Any, options: Sequence[str] = ()) -> Any:
        lifeline, ours = os.pipe()
        guardian = (sys.executable, "-P", "-m", "worker.process.guardian", "--lifeline", str(lifeline), *options)
        process = subprocess.Popen(
            [*guardian, "--", *command],
            pass_fds=(lifeline,),
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        os.close(lifeline)
        started.append((process, ours))
        return process, ours

    yield start
    for process, ours in started:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(OSError):
            os.close(ours)


def test_a_parent_killed_with_minus_9_leaves_no_orphan(scripted: Any, ended: Any) -> None:
    command = scripted(["pids"], ["ignore_sigterm"], ["sleep", 600])
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, json.dumps(command)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        pids = json.loads(parent.stdout.readline())
        assert len(set(pids)) == 3  # guardian, child, grandchild
        assert {os.getpgid(pid) for pid in pids} == {pids[0]}
        assert os.getpgid(parent.pid) != pids[0]
        parent.kill()
    assert ended(pids, 2)


@pytest.mark.parametrize("code", [0, 1, 5, 77])
def test_it_exits_as_its_command_did(guarded: Any, code: Any) -> None:
    process, _ = guarded(sys.executable, "-c", f"raise SystemExit({code})")
    assert process.wait(240) == code


def test_a_signal_becomes_128_plus_its_number(guarded: Any) -> None:
    process, _ = guarded(sys.executable, "-c", "import os; os.kill(os.getpid(), 11)")
    assert process.wait(240) == 128 + 11


def test_sigterm_reaches_the_command_and_not_the_guardian(guarded: Any) -> None:
    # blocked until it is waited for: between its last look at handlers and `pause`, Python would sleep over a signal
    program = (
        "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('ready', flush=True); "
        "sys.exit(42 if signal.sigwait([signal.SIGTERM]) == signal.SIGTERM else 1)"
    )
    process, _ = guarded(sys.executable, "-c", program)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 42


def test_the_end_of_the_lifeline_kills_the_group(guarded: Any, ended: Any) -> None:
    program = "import os, signal; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()"
    process, lifeline = guarded(sys.executable, "-c", program)
    pid = int(process.stdout.readline())
    os.close(lifeline)
    assert process.wait(240) == -signal.SIGKILL
    assert ended([pid], 2)


def test_it_kills_the_group_when_its_time_is_over_though_the_parent_only_stands_still(guarded: Any, ended: Any) -> None:
    program = "import os, signal; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()"
    until = node_seconds() + 1.5
    process, lifeline = guarded(sys.executable, "-c", program, options=["--until", str(until)])
    pid = int(process.stdout.readline())
    until = max(until, node_seconds()) + 0.5
    os.write(lifeline, MOMENT.pack(until - 0.2))
    os.write(lifeline, MOMENT.pack(until))
    assert process.wait(240) == -signal.SIGKILL
    assert until <= node_seconds() < until + 1
    assert ended([pid], 2)


def test_the_command_does_not_hold_the_lifeline(guarded: Any) -> None:
    program = "import os; print(len(os.listdir('/proc/self/fd')))"
    process, _ = guarded(sys.executable, "-c", program)
    # standard streams and the directory being read
    assert int(process.stdout.readline()) == 4


def test_it_needs_the_standard_library_alone() -> None:
    program = (
        "import sys; import worker.process.guardian; "
        "ours = sys.stdlib_module_names | {'worker', '__main__'};"
        "print([n for n in sys.modules if n.partition('.')[0] not in ours])"
    )
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(Path.cwd())!r}); {program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "[]\n"
