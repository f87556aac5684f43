"""Bounds of what a stranger's configuration may cost before a weight is read.

============  ==========================================================
seconds       60, by an alarm of the main thread
memory        1 GiB of the process's own beyond what it has
modules       100,000 registered
parameters    as many numbers as the caller says
reaching out  no connection, no look-up of a name, no other program
============  ==========================================================
"""

import contextlib
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from worker.execution.refusal import Refusal

MOST_SECONDS = 60.0
MOST_BYTES = 2**30
MOST_MODULES = 100_000
_FORBIDDEN = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "subprocess.Popen", "os.exec", "os.fork",
              "os.posix_spawn", "os.system")  # fmt: skip


class _Exceeded(BaseException):
    """A bound that is passed; no exception, which another package's code could take for one of its own."""


class _TooMany(_Exceeded):
    """More numbers than the caller says."""


@dataclass(kw_only=True)
class _Count:
    """Modules and numbers that were registered."""

    most_numbers: int
    modules: int = 0
    numbers: int = 0

    def add_module(self, _: nn.Module, __: str, ___: nn.Module) -> None:
        """Count a module."""
        self.modules += 1
        if self.modules > MOST_MODULES:
            raise _Exceeded(f"more than {MOST_MODULES:,} modules")

    def add_parameter(self, _: nn.Module, __: str, parameter: nn.Parameter | None) -> None:
        """Count the numbers of a parameter."""
        self.numbers += 0 if parameter is None else parameter.numel()
        if self.numbers > self.most_numbers:
            raise _TooMany(f"more than {self.most_numbers:,} weights")


_audited: list[bool] = []
"""Whether a build is under way, for the hook, which cannot be taken away again."""


def _audit(event: str, _: Any) -> None:  # noqa: ANN401 - the arguments of whichever event
    if _audited and _audited[-1] and event.startswith(_FORBIDDEN):
        raise _Exceeded(f"a connection or another program (`{event}`)")


@contextlib.contextmanager
def bounded(
    pointer: str, most_numbers: int = 2**62, excess: Callable[[int], Refusal] | None = None, *, of_meta: bool = True
) -> Iterator[None]:
    """Keep what is built here within the bounds; ``Refusal`` of the field ``pointer`` if one is passed.

    At most ``most_numbers`` may be registered in all parameters; ``excess`` makes the refusal of so many or more, in
    place of a general one. With ``of_meta`` everything stands on the meta device, so that memory and seconds are
    bounded too.
    """
    count = _Count(most_numbers=most_numbers)
    if not _audited:
        _audited.append(False)
        sys.addaudithook(_audit)
    hooks = [
        register_module_module_registration_hook(count.add_module),
        register_module_parameter_registration_hook(count.add_parameter),
    ]
    _audited.append(True)
    try:
        with _alarm() if of_meta else contextlib.nullcontext(), _less_memory() if of_meta else contextlib.nullcontext():
            yield
    except _Exceeded as error:
        if excess is not None and isinstance(error, _TooMany):
            raise excess(count.numbers) from None
        raise Refusal(
            f"config.json: to build the model that it describes takes {error}; take a smaller one, or load it yourself "
            "(`source: factory`)",
            pointer=pointer,
            code="invalid_config",
        ) from None
    finally:
        _audited.pop()
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """Raise in this thread after the seconds that there are, where it is the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_: int, __: FrameType | None) -> None:
        raise _Exceeded(f"more than {MOST_SECONDS:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _less_memory() -> Iterator[None]:
    """Lower this process's limit of memory of its own, where the kernel says how much it has."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        yield
        return
    own = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), None)
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    if own is None:
        yield
        return
    wanted = own + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if before < 0 else min(wanted, before), most))
    try:
        yield
    except MemoryError:
        raise _Exceeded(f"more than {MOST_BYTES / 2**30:.0f} GiB of memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))
