"""What keeps a job safe, taken away: each of the service's protections, removed in the processes that are told so.

The processes are the service's own, started as ever but for a folder on PYTHONPATH whose
``sitecustomize`` names the removal. It changes a module right after that was first imported; one
that no longer has what is to be changed ends the process, so that no removal is a removal of nothing.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

_ROOT = Path(__file__).resolve().parents[2]


DIE = "die-in-write"
"""Where a file of this name stands beside ``sitecustomize.py``, the next to take a file in dies halfway through."""


def preload(folder: Path, *names: str) -> tuple[Path, ...]:
    """Folders for PYTHONPATH with which a process starts so changed."""
    assert set(names) <= set(CHANGES), names
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "from pathlib import Path",
        "from tests.chaos import removals",
        "",
        f"removals.install({names!r}, Path(__file__).parent)",
    ]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return (folder, _ROOT)


def install(names: Sequence[str], folder: Path) -> None:
    """Have the modules concerned changed once they are imported; ``folder`` holds what the changes look for."""
    changes: dict[str, list[Change]] = {}
    for name in names:
        for module, change in CHANGES[name].items():
            changes.setdefault(module, []).append(change)
    sys.meta_path.insert(0, _Finder(changes, folder))


Change = Callable[[Any, Path], None]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Mapping[str, Sequence[Change]], folder: Path) -> None:
        self._changes = changes
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._changes:
            return None
        others = (each for each in sys.meta_path if each is not self)
        spec = next(spec for each in others if (spec := each.find_spec(fullname, path, target)) is not None)
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader, self._changes[fullname], self._folder)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, changes: Sequence[Change], folder: Path) -> None:
        self._loader = loader
        self._changes = changes
        self._folder = folder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for change in self._changes:
            change(module, self._folder)


def _no_fence(fence: Any, _folder: Path) -> None:
    """Whoever names the job may write."""
    assert fence.draw_fenced

    def unfenced(connection: Any, claim: Any) -> Any:
        row = fence.draw(connection, fence.jobs.c.id == claim.job_id)
        if row is None:
            raise fence.LeaseLost(claim.job_id, claim.fence)
        return row

    fence.draw_fenced = unfenced


def _held_wakeups(wakeups: Any, _folder: Path) -> None:
    """No protection is lost by this: a process waits before it sends a wake-up, where somebody wants that."""
    publish = wakeups.WakeupSender._publish

    def held(self: Any) -> None:
        gates = Path(os.environ["CHAOS_GATES"])
        while (gates / "wakeup.hold").exists():
            (gates / f"wakeup.{os.getpid()}.seen").touch()
            time.sleep(0.01)
        publish(self)

    wakeups.WakeupSender._publish = held


def _no_poll(agent: Any, _folder: Path) -> None:
    """The queue is polled after a wake-up only."""
    assert agent.Agent._poll

    def wait_for_wakeups(self: Any) -> None:
        while not self._draining:
            self._wakeup.wait()
            self._wakeup.clear()
            while self.take():
                pass

    agent.Agent._poll = wait_for_wakeups


def _no_reaper(reaper: Any, _folder: Path) -> None:
    """Nobody is taken to be silent, nor to have ended."""
    for name in ("reap_expired", "reap_ended_worker"):
        assert getattr(reaper, name)
        setattr(reaper, name, lambda *_, **__: 0)


def _no_idempotency(submission: Any, _folder: Path) -> None:
    """Keys are taken, and forgotten."""
    submit = submission.submit
    assert submission.submitted_earlier
    submission.submitted_earlier = lambda *_, **__: None
    submission.submit = lambda engine, tenant, document, _key=None, **more: submit(
        engine, tenant, document, None, **more
    )


def _mortal_takes(local_objects: Any, folder: Path) -> None:
    """No protection is lost by this: a file is copied in two halves, and its process may die between them."""
    assert local_objects._copy

    def copy(source: BinaryIO, part: Path) -> None:
        content = source.read()
        with part.open("wb", buffering=0) as file:
            file.write(content[: len(content) // 2])
            if (folder / DIE).exists():
                (folder / DIE).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            file.write(content[len(content) // 2 :])

    local_objects._copy = copy


def _no_rename(local_objects: Any, _folder: Path) -> None:
    """An object is written straight under its final name."""
    assert local_objects.LocalObjects.put

    def put(self: Any, key: str, source: Any, *, sha256: str, size_bytes: int) -> None:
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with local_objects.open_plain(source, size_bytes, called=key) as file:
            local_objects._copy(file, target)
        with local_objects.open_plain(target, size_bytes, called=key) as file:
            local_objects.require_digest(file, sha256, called=key)

    local_objects.LocalObjects.put = put


CHANGES: Mapping[str, Mapping[str, Change]] = {
    "fence": {"jobs.queue.fence": _no_fence},
    "poll": {"worker.agent.agent": _no_poll},
    "reaper": {"jobs.queue.reaper": _no_reaper},
    "idempotency": {"jobs.repository.submission": _no_idempotency},
    "rename": {"jobs.objects.local_store": _no_rename},
    "held wake-ups": {"jobs.queue.wakeups": _held_wakeups},
    "mortal takes": {"jobs.objects.local_store": _mortal_takes},
}
"""By name: which module is changed, and how."""
