"""The process group of a job: how ranks join, wait for each other, and end together where one of them fails.

Three channels serve three needs. A gloo group moves what stands on the host and small objects, the device's own
backend moves what stands there, and the store of the process group carries notes, which need no other rank's
attention: a rank that fails leaves its error there, and each rank signs there at every batch.

A rank waits for the others as long as any of them shows a sign of life: the timeout counts from the last one. Between
two meetings nothing is sent, so ranks with uneven parts of the data may be hours apart.
"""

import contextlib
import datetime as dt
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from engine.distributed.peers import foreign_peers, own_sockets
from engine.distributed.traffic import Traffic
from engine.errors import EngineError, RankFailed, RankTimedOut, StopRequested, Unwinding

TIMEOUT_SECONDS = 1800.0
"""How long a rank waits without a sign of life, unless another time is given."""
_WATCHDOG = 3  # times that, after which NCCL's ends the process: of a silent rank we are to tell before
_LOOK_SECONDS = 0.5
_LINGER_SECONDS = 2.0
_STORE = "KRONOSCOPE_RANK_STORE"
"""How often a rank that waits looks for notes."""
_VARIABLES = ("RANK", "WORLD_SIZE")
_MEETING_PLACES = (("MASTER_ADDR", "MASTER_PORT"), (_STORE,))
"""Variables that tell ranks where they meet: at a port, as torch's launcher says, or in a file, which no other user of
the machine can come to."""


class RankLeft(Unwinding):
    """Another rank has left its pass, so this one does too."""


@dataclass(eq=False)
class Ranks:
    """The ranks of one job, seen from one of them."""

    rank: int
    size: int
    """W; of a process alone 1, which waits for nothing and moves nothing."""
    device: torch.device
    timeout_seconds: float
    store: Any
    """Key-value store of this job's notes."""
    host: Any = None
    """Process group for tensors on the host, and for objects."""
    accelerated: Any = None
    """Process group for tensors on the device; on a CPU the same."""
    one_node: bool = False
    """Whether all ranks run under one kernel, and so may hold memory together; ``join_node`` settles it."""
    traffic: Traffic = field(default_factory=Traffic)
    serving: Callable[[], None] | None = None
    """Gives the others what they need of this rank until all have come to a meeting; None where that is nothing."""
    _meetings: int = 0
    _seen: int = -1

    @classmethod
    def alone(cls) -> "Ranks":
        """Return the group of a process that measures alone."""
        return cls(rank=0, size=1, device=torch.device("cpu"), timeout_seconds=TIMEOUT_SECONDS, store=None)

    def sign(self) -> None:
        """Show a sign of life, and leave if another rank has failed or left its pass; called once a batch.

        Raises:
            RankFailed: If another rank has left a note of its failure.
            RankLeft: If another rank has left its pass, which all begin anew.
        """
        if self.size == 1:
            return
        self.note("sign")
        self.raise_if_failed()
        if self.store.check([f"left/{self._meetings}"]):
            raise RankLeft

    def leave(self) -> None:
        """Let the other ranks know that this one has left its pass before the end."""
        self.note(f"left/{self._meetings}")

    def raise_if_failed(self) -> None:
        """Raise ``RankFailed`` if another rank has failed, with that rank and its error."""
        try:
            note = json.loads(self.store.get("failed")) if self.store.check(["failed"]) else None
        except RuntimeError as error:
            raise RankFailed(f"rank 0 of {self.size}, which keeps the notes of all, is gone: {error}") from error
        if note is not None and note["rank"] != self.rank:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"told/{self.rank}", "1")
            if note["error"] == StopRequested.__name__:
                raise StopRequested(f"rank {note['rank']} was asked to stop")
            raise RankFailed(
                f"rank {note['rank']} of {self.size} failed: {note['error']}: {note['message']}",
                category=note["category"],
                layer=note["layer"],
                pointer=note["pointer"],
            )

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Let the other ranks know of an error within; they leave with it instead of waiting for this rank."""
        if self.size == 1:
            yield
            return
        try:
            yield
        except RankFailed:
            _forget_groups()
            self._linger()
            raise
        except BaseException as error:
            _forget_groups()
            self._post(error)
            self._linger()
            raise

    def _post(self, error: BaseException) -> None:
        known = isinstance(error, EngineError)
        category = error.category if isinstance(error, EngineError) else "fatal"
        note = {
            "rank": self.rank,
            "error": type(error).__name__,
            "message": "the job was asked to stop" if isinstance(error, StopRequested) else str(error)[:2000],
            "category": category,
            "layer": error.layer if known and isinstance(error, EngineError) else None,
            "pointer": error.pointer if known and isinstance(error, EngineError) else None,
        }
        with contextlib.suppress(RuntimeError):
            self.store.set(f"told/{self.rank}", "1")
            # the first to fail is the one to be named
            self.store.compare_set("failed", "", json.dumps(note))

    def _linger(self) -> None:
        """Keep the notes for a moment, where they end with this process: the others are still to read who failed."""
        others, deadline = [f"told/{rank}" for rank in range(1, self.size)], time.monotonic() + _LINGER_SECONDS
        holds = self.rank == 0 and not os.environ.get(_STORE)
        with contextlib.suppress(RuntimeError):
            while holds and not self.store.check(others) and time.monotonic() < deadline:
                time.sleep(0.01)

    def meet(self, operation: str) -> None:
        """Wait until every rank has come to this point, before the operation that is named.

        Raises:
            RankFailed: If one has failed instead.
            RankTimedOut: If none has shown a sign of life for the whole timeout.
        """
        if self.serving is not None:
            self.serving()
        self._meetings += 1
        place = f"meet/{self._meetings}"
        self.note(f"{place}/{self.rank}")
        arrived = self.note(place)
        pause, deadline, looked = 0.0005, time.monotonic() + self.timeout_seconds, time.monotonic()
        while arrived < self.size:
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            arrived = self.note(place, 0)
            now = time.monotonic()
            if now - looked >= _LOOK_SECONDS:
                looked = now
                self.raise_if_failed()
                if (signs := self.note("sign", 0)) != self._seen:
                    self._seen, deadline = signs, now + self.timeout_seconds
            if now > deadline:
                missing = [each for each in range(self.size) if not self.note(f"{place}/{each}", 0)]
                raise RankTimedOut(
                    f"rank {self.rank} of {self.size} waited {self.timeout_seconds:g} s at `{operation}` for rank"
                    f"{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}, without a sign of life of any; "
                    "look at what those ranks do, or raise the timeout"
                )

    def note(self, key: str, by: int = 1) -> int:
        """Add to a number that all ranks read, and return the sum.

        Raises:
            RankFailed: If the rank that keeps the numbers is gone.
        """
        try:
            return int(self.store.add(key, by))
        except RuntimeError as error:
            raise RankFailed(f"rank 0 of {self.size}, which keeps the notes of all, is gone: {error}") from error

    def gather(self, value: Any, operation: str) -> list[Any]:  # noqa: ANN401 - whatever can be pickled
        """Return every rank's value, on every rank.

        Args:
            value: This rank's; anything that can be pickled.

        Returns:
            One value of each rank, in the order of the ranks.

        Raises:
            RankFailed: If a rank has failed instead, or its connection is lost.
            RankTimedOut: If one does not come.
        """
        if self.size == 1:
            return [value]
        self.meet(operation)
        values: list[Any] = [None] * self.size
        with self.naming(operation):
            dist.all_gather_object(values, value, group=self.host)
        return values

    def broadcast(self, value: Any, source: int, operation: str) -> Any:  # noqa: ANN401 - whatever can be pickled
        """Return one rank's value, on every rank.

        Args:
            value: That of the rank ``source``; ignored on the others.
            source: The rank.

        Raises:
            RankFailed: If a rank has failed instead, or its connection is lost.
            RankTimedOut: If one does not come.
        """
        if self.size == 1:
            return value
        self.meet(operation)
        values = [value if self.rank == source else None]
        with self.naming(operation):
            dist.broadcast_object_list(values, src=source, group=self.host)
        return values[0]

    @contextlib.contextmanager
    def naming(self, operation: str, layer: str | None = None) -> Iterator[None]:
        """Turn an error of the backend into one that names rank, operation and the layer that it is made for."""
        try:
            yield
        except RuntimeError as error:
            # a rank that failed may leave its note a moment after its connections are gone
            for _ in range(10):
                self.raise_if_failed()
                time.sleep(0.05)
            where = f"`{operation}`" + (f" of layer `{layer}`" if layer else "")
            raise RankFailed(
                f"rank {self.rank} of {self.size} lost another rank in {where}: {error}", layer=layer
            ) from error

    def wait(self, work: Any, operation: str, layer: str) -> None:  # noqa: ANN401 - torch's own handle
        """Wait for a transfer, by the handle that the backend returned; None where nothing is under way.

        Raises:
            RankFailed: If a rank has failed, or its connection is lost.
            RankTimedOut: If it is not done in time.
        """
        if work is None:
            return
        pause, begun = 0.00002, time.monotonic()
        looked = begun
        with self.naming(operation, layer):
            while not work.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, 0.002)
                now = time.monotonic()
                if now - looked >= _LOOK_SECONDS:
                    looked = now
                    self.raise_if_failed()
                if now - begun > self.timeout_seconds:
                    raise RankTimedOut(
                        f"rank {self.rank} of {self.size} waited {self.timeout_seconds:g} s in `{operation}` of layer "
                        f"`{layer}`; look at what the other ranks do, or raise the timeout",
                        layer=layer,
                    )
            work.wait()

    def group_of(self, device: torch.device) -> Any:  # noqa: ANN401 - torch's own type
        """Return the process group that moves tensors of a device: the host's, or the accelerated one."""
        return self.host if device.type == "cpu" else self.accelerated


class _Groups:
    """Process groups that were made for an earlier job of this process, and how many jobs have joined."""

    world: Any = None
    timeout_seconds: float = 0.0
    host: Any = None
    accelerated: Any = None
    joined: int = 0
    started: bool = False
    waits_seconds: float = TIMEOUT_SECONDS
    """Timeout that ``start`` was given."""


def _forget_groups() -> None:
    """Make new groups for the next job: connections of these may be broken."""
    _Groups.world = _Groups.host = _Groups.accelerated = None


def start(device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS) -> Ranks:
    """Initialise the process group that torch's launcher describes in the environment, and join it.

    Args:
        device: Device of this rank.
        timeout_seconds: How long a rank waits for the others without a sign of life.

    Returns:
        The ranks; this process alone where the environment describes none, or one.

    Raises:
        RankFailed: If the other ranks do not come.
    """
    described = any(all(os.environ.get(name) for name in (*_VARIABLES, *place)) for place in _MEETING_PLACES)
    if not described or int(os.environ["WORLD_SIZE"]) < 2:
        return Ranks.alone()
    if not dist.is_initialized():
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        place, limit = os.environ.get(_STORE), dt.timedelta(seconds=timeout_seconds)
        own: dict[str, Any] = {"timeout": limit * _WATCHDOG, "device_id": device} if cuda else {"timeout": limit}
        with _meeting(f"rank {rank} of {size}"):
            if place is not None:
                # not by `file://`, which reads no escapes: ranks would wait in a file of another name
                store = dist.FileStore(place, int(size))  # type: ignore[attr-defined]
                own |= {"store": store, "rank": int(rank), "world_size": int(size)}
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **own)
        _Groups.started, _Groups.waits_seconds = True, timeout_seconds
    return join(device, timeout_seconds)


def stop() -> None:
    """Leave the process group that ``start`` has initialised; nothing happens where there is none."""
    if _Groups.started and dist.is_initialized():
        _forget_groups()
        _Groups.started, _Groups.waits_seconds = False, TIMEOUT_SECONDS
        dist.destroy_process_group()


def join(device: torch.device, timeout_seconds: float | None = None) -> Ranks:
    """Join the process group that this process has initialised, for one job.

    Every rank joins as often as the others, in the same order.

    Args:
        device: Device of this rank.
        timeout_seconds: How long a rank waits for the others without a sign of life; None takes that of ``start``.

    Returns:
        The ranks; this process alone outside of a process group, or where it has one rank.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return Ranks.alone()
    _Groups.joined += 1
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only store that every rank has already
    ranks = Ranks(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=device,
        timeout_seconds=_Groups.waits_seconds if timeout_seconds is None else timeout_seconds,
        store=dist.distributed_c10d.PrefixStore(f"kronoscope/{_Groups.joined}", store),
    )
    _make_groups(ranks)
    return ranks


def _make_groups(ranks: Ranks) -> None:
    """Give the ranks the groups of the job before; new ones for all of them where one has lost them."""
    known = _Groups
    if known.world is not dist.group.WORLD or known.timeout_seconds != ranks.timeout_seconds:
        ranks.note("fresh")
    ranks.meet("join")
    if ranks.note("fresh", 0):
        limit, cuda = dt.timedelta(seconds=ranks.timeout_seconds), ranks.device.type == "cuda"
        with _meeting(f"rank {ranks.rank} of {ranks.size}"):
            known.host = dist.new_group(backend="gloo", timeout=limit)
            known.accelerated = dist.new_group(backend="nccl", timeout=limit * _WATCHDOG) if cuda else known.host
        known.world, known.timeout_seconds = dist.group.WORLD, ranks.timeout_seconds
    ranks.host, ranks.accelerated = known.host, known.accelerated


@contextlib.contextmanager
def _meeting(rank: str) -> Iterator[None]:
    """Raise where ranks that connect do not meet, or another user's process is at the other end of a connection."""
    earlier = own_sockets()
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise RankFailed(f"{rank} could not meet the others: {error}") from error
    if foreign := foreign_peers(earlier):
        raise RankFailed(
            f"{rank} was met by {foreign[0]} in the place of a rank; the attempt ends, since nothing that it would be"
            " told can be trusted"
        )
