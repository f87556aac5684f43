"""The child seen from its parent: one guarded process, its assignment, its frames, its end.

Used by the supervisor (whose sink is the ledger) and by the foreground runner (whose sink is a
folder). Knows neither torch nor the ledger.
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from catalog.frame_bounds import FrameBeyond
from catalog.frames import MAX_FRAME_BYTES, CacheAnswer, Frame, decode, encode_answer
from catalog.record import record
from worker.process.confinement import Confinement, Excess
from worker.process.guardian import MOMENT
from worker.process.leftovers import clear_leftovers
from worker.process.process_group import began, group_lives, kill_descendants, lines, wait_until_gone

EXECUTION = (sys.executable, "-P", "-m", "worker.execution")
RANKS = (sys.executable, "-P", "-m", "worker.execution.ranks")
"""The same with several processes, each of which computes a part."""
STOP_GRACE_SECONDS = 8.0
"""From SIGTERM to SIGKILL: a child reaches its next checkpoint well within it, or never."""

_GUARDIAN = (sys.executable, "-P", "-m", "worker.process.guardian")
_GROUP_GONE_SECONDS = 5.0
_REPORT_BYTES = 65_536
_ALL_FRAMES_BYTES = 2**32
"""Most bytes of all frames of an attempt: they become rows of the ledger, which no quota counts."""

# Model code runs in the child, so it gets what computing needs by name; a deny-list would have to know
# every secret an operator ever sets.
_PASSED_NAMES = {
    "HOME",
    "HF_DATASETS_CACHE",
    "HF_DATASETS_OFFLINE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "SCIKIT_LEARN_DATA",
    "TMPDIR",
    "TRANSFORMERS_OFFLINE",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
}
_PASSED_PREFIXES = ("CUBLAS", "CUDA_", "KMP_", "LC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS_", "PYTORCH_")


class MalformedFrame(ValueError):
    """The child wrote something that is not a frame; it cannot be trusted any further."""


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a service's environment that a child may see: no database, no broker, no secret."""
    return {
        name: value for name, value in environ.items() if name in _PASSED_NAMES or name.startswith(_PASSED_PREFIXES)
    }


@record
class Hold:
    """The permission of a child to run."""

    until: float
    """When its guardian kills it, on the machine's clock (`node_seconds`), unless `Child.extend` comes before."""
    lock: int | None = None
    """A descriptor of the worker's lock, which the guardian holds on to as long as it lives."""


class Child:
    """A running child. ``start`` makes one; the group is gone when ``wait`` returns."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        frames: IO[bytes],
        answers: int,
        lifeline: int,
        report: int,
        user: int | None = None,
    ) -> None:
        self._process = process
        self._answers = answers
        self._user = user
        self._frames = frames
        self.began = began(process.pid)
        """When the guardian began, in the kernel's count; it is not reaped before the reaper below runs."""
        self._lifeline = lifeline
        self._report = report
        self._lock = threading.Lock()
        self._reaped = False
        self._gone = threading.Event()
        self._gone_read, self._gone_write = os.pipe()  # the same for readers that wait for bytes
        try:
            threading.Thread(target=self._reap, name=f"reaper-{process.pid}", daemon=True).start()
        except RuntimeError:
            os.close(self._gone_read)
            os.close(self._gone_write)
            raise

    @classmethod
    def start(
        cls,
        assignment: Mapping[str, Any],
        output: int | IO[bytes],
        environment: Mapping[str, str],
        command: Sequence[str] = EXECUTION,
        confinement: Confinement = Confinement(),  # noqa: B008 - frozen
        hold: Hold | None = None,
    ) -> Self:
        """Start guardian and child; ``OSError`` if no process, pipe, thread or temporary file can be had.

        The child reads ``assignment`` from its standard input; its output and error go to ``output``
        (``subprocess.PIPE``: to ``.output``), and ``environment`` is its whole environment. ``command`` is completed by
        ``--answers FD --frames FD``. It may run until ``hold`` ends; with None, as long as this process lives.
        """
        # a file, not a pipe: a child that never reads cannot block its supervisor
        with tempfile.NamedTemporaryFile() as text:
            text.write(json.dumps(assignment, allow_nan=False).encode())
            text.flush()
            # opened anew, to be read only: no quota would count what a child writes to it
            with Path(text.name).open("rb") as given:
                arguments = [*_hold_arguments(hold), "--confinement", confinement.as_text()]
                return cls.launch(given, output, environment, command, arguments, _lock(hold), confinement.user)

    @classmethod
    def launch(
        cls,
        given: IO[bytes],
        output: int | IO[bytes],
        environment: Mapping[str, str],
        command: Sequence[str],
        arguments: Sequence[str],
        passed: Sequence[int],
        user: int | None = None,
    ) -> Self:
        """Start a guardian with arguments of its own, and the descriptors that they name; see `start`."""
        with contextlib.ExitStack() as ours:
            lifeline_read, lifeline = _pipe(ours)
            report, report_write = _pipe(ours)
            frames_read, frames_write = _pipe(ours)
            answers_read, answers = _pipe(ours)
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules, no shell
                [
                    *(*_GUARDIAN, "--lifeline", str(lifeline_read), "--report", str(report_write), *arguments),
                    *("--", *command, "--answers", str(answers_read), "--frames", str(frames_write)),
                ],
                stdin=given,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=(lifeline_read, report_write, frames_write, answers_read, *passed),
                start_new_session=True,
            )
            ours.pop_all()
        for end in (lifeline_read, report_write, frames_write, answers_read):
            os.close(end)
        os.set_blocking(lifeline, False)
        os.set_blocking(answers, False)
        frames = os.fdopen(frames_read, "rb")
        try:
            return cls(process, frames, answers, lifeline, report, user)
        except (OSError, RuntimeError) as error:
            frames.close()
            os.close(answers)
            os.close(report)
            os.close(lifeline)  # whereupon the guardian ends all that it guards, and itself
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            raise OSError(errno.EAGAIN, f"nobody can look after it ({error})") from error

    @property
    def pid(self) -> int:
        """Process id of the guardian, which is also the group's id."""
        return self._process.pid

    def left_something(self) -> bool:
        """Whether anything of the group lives on although it was killed, stuck in the kernel as it may be."""
        return group_lives(self.pid, self.began)

    def output(self, limit: int) -> Iterator[bytes]:
        """Yield lines of standard output and error with their ends, where ``start`` was given ``subprocess.PIPE``.

        They end when the group is gone; a line longer than the limit comes in pieces.
        """
        if self._process.stdout is None:
            raise ValueError("this child was started with an output of its own; there is no pipe to read")
        return lines(self._process.stdout.fileno(), self._gone_read, limit)

    def frames(self) -> Iterator[Frame]:
        """Frames in order, until the child's end of the pipe closes or the group is gone.

        ``MalformedFrame`` for a line that is too long or not a frame; one cut short by the child's death is neither,
        since the death itself counts. ``FrameBeyond`` for what no process of ours would say, or for too much in all.
        """
        size = 0
        for line in lines(self._frames.fileno(), self._gone_read, MAX_FRAME_BYTES + 1):
            if not line.endswith(b"\n"):
                if len(line) > MAX_FRAME_BYTES:
                    raise MalformedFrame(f"a line of more than {MAX_FRAME_BYTES:,} bytes came over the frame pipe")
                return
            size += len(line)
            if size > _ALL_FRAMES_BYTES:
                raise FrameBeyond(f"more than {_ALL_FRAMES_BYTES:,} bytes of frames")
            try:
                yield decode(line)
            except FrameBeyond:
                raise
            except (ValueError, RecursionError, AttributeError) as error:
                raise MalformedFrame(
                    f"the frame pipe carried a line that is not a frame ({type(error).__name__})"
                ) from error

    def answer(self, answer: CacheAnswer) -> None:
        """Answer a question of the child's; what it does not read is dropped, since it does not wait for it."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._answers, encode_answer(answer))

    def terminate(self) -> None:
        """Ask it to stop at its next checkpoint (SIGTERM, forwarded by the guardian)."""
        with self._lock:
            if not self._reaped:
                os.kill(self.pid, signal.SIGTERM)  # not Popen's: it would reap the leader before its group

    def extend(self, until: float) -> None:
        """Let it run until a moment of the machine's clock (`node_seconds`), when its guardian kills it.

        A caller that stops calling this, for whatever reason, has it killed in time.
        """
        with self._lock:
            if not self._reaped:
                # a guardian that stands still reads nothing, and one that has ended guards nothing
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(self._lifeline, MOMENT.pack(until))

    def has_ended(self) -> bool:
        """Whether its guardian has ended, be anything left of the group or not."""
        with self._lock, contextlib.suppress(ChildProcessError):
            if not self._reaped:
                return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def begin(self, user: int | None, until: float) -> None:
        """Have one that was started before its job was known begin it, as this user, now that its order is written."""
        self._user = user
        self.extend(until)

    def kill(self) -> None:
        """End it and everything it started, now."""
        with self._lock:
            self._kill_group()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the whole process group is gone, and return the exit code; 128 + n if signal n ended the child.

        Raises TimeoutError if it still runs after so many seconds; None waits for ever.
        """
        if not self._gone.wait(timeout):
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def excess(self) -> Excess | None:
        """Wait for the end of the group, and return what it had on the disk if that was beyond its limit."""
        self.wait()
        text = os.read(self._report, _REPORT_BYTES)  # its only writer is gone
        return Excess.from_bytes(text) if text else None

    def close(self) -> None:
        """Kill what still runs, remove what its user has left behind, and give the pipes back."""
        self.kill()
        self.wait()
        if self._user is not None and not self.left_something():
            clear_leftovers(self._user)
        self._frames.close()
        for end in (self._answers, self._lifeline, self._report, self._gone_read):
            os.close(end)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _reap(self) -> None:
        """Wait for the guardian, then take what it left behind; the pid stays ours until it is reaped."""
        try:
            with contextlib.suppress(ChildProcessError):  # where this process was set to ignore that children end
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                self._kill_group()
                self._process.wait()
                self._reaped = True
            wait_until_gone(self.pid, _GROUP_GONE_SECONDS)
        finally:
            os.close(self._gone_write)  # readers see its end
            self._gone.set()

    def _kill_group(self) -> None:
        if not self._reaped:
            kill_descendants(self.pid)  # what left the group is still below its guardian
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _hold_arguments(hold: Hold | None) -> list[str]:
    if hold is None:
        return []
    lock = [] if hold.lock is None else ["--lock", str(hold.lock)]
    return ["--until", str(hold.until), *lock]


def _lock(hold: Hold | None) -> tuple[int, ...]:
    return () if hold is None or hold.lock is None else (hold.lock,)


def _pipe(ours: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe of which both ends are closed if starting fails."""
    ends = os.pipe()
    for end in ends:
        ours.callback(os.close, end)
    return ends
