"""The nemesis: a seeded series of faults, each aimed at the process that holds a job at that moment.

A fault that hits nobody proves nothing, so whoever is to suffer is read from the database. It spares
what a job may not survive by its own rules: one that has failed nearly as often as it may, and a
second crash of a child where the first would make it poison.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from redis.exceptions import RedisError
from sqlalchemy import text

from jobs.errors import LedgerUnavailable
from jobs.lifecycle import TERMINAL
from tests.chaos.stack.processes import Part, below, command_of
from tests.chaos.stack.proxy import LossyProxy
from tests.chaos.stack.stack import Stack
from tests.machine.stopwatch import Stopwatch

_SPARED_FAILURES = 2
"""Failures that a job keeps for what happens by itself."""
_AIM_SECONDS = 60
_PATIENCE_SECONDS = 60
"""At least so long a fault is waited for to have its effect."""
_END_SECONDS = 300
_MALFORMED = ("[]", "{}", "null", "{this is not a message", "[" * 5000, '{"properties": [], "headers": {}, "body": ""}')
_STILL_HELD = text("SELECT count(*) FROM jobs WHERE id = :job AND fence = :fence AND state = 'running'")
_HELD = text(
    "SELECT id, lease_owner, fence FROM jobs WHERE state = 'running' AND lease_owner IS NOT NULL "
    "AND failures < max_failures - :spared AND (NOT :crash OR NOT EXISTS ("
    "SELECT 1 FROM job_events WHERE job_id = jobs.id AND type = 'crash')) ORDER BY id"
)
_TERMINATE = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name")


@dataclass(frozen=True)
class Aim:
    """A job and the worker that holds it."""

    job_id: str
    fence: int
    part: Part


@dataclass(frozen=True)
class Struck:
    """A fault that was done."""

    at: float
    """Seconds since 1970, as the databases' own clock here."""
    fault: str
    part: str
    job_id: str | None = None
    fence: int | None = None


@dataclass
class Nemesis:
    """Strikes one part after another; whatever it kills it starts again, as a supervisor of processes would."""

    stack: Stack
    proxy: LossyProxy
    seed: int
    gap_seconds: float
    lease_seconds: float
    struck: list[Struck] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._faults: Mapping[str, Callable[[], Struck | None]] = {
            "kill worker": self._kill_worker,
            "kill child": self._kill_child,
            "kill guardian": self._kill_guardian,
            "kill rank": self._kill_rank,
            "kill two workers": self._kill_two_workers,
            "kill api": self._kill_api,
            "stop beyond the lease": self._stop_beyond_lease,
            "pause": self._pause,
            "sigterm": self._sigterm,
            "flushall": self._flushall,
            "kill redis": self._kill_redis,
            "restart postgres": self._restart_postgres,
            "terminate backends": self._terminate_backends,
            "double wake-ups": self._double_wakeups,
            "lose replies": self._lose_replies,
            "silent database": self._silent_database,
            "redis a replica": self._redis_a_replica,
            "redis full": self._redis_full,
            "malformed messages": self._malformed_messages,
        }

    @property
    def kinds(self) -> Sequence[str]:
        """The names of the faults."""
        return list(self._faults)

    def rage(self, seconds: float, lacking: Callable[[], Sequence[str]], limit: float) -> None:
        """Every fault once, in an order of the seed's; then more of them until the time is over and there was enough.

        Args:
            seconds: When it may end.
            lacking: Faults that would help where too little has happened for the campaign to count.
            limit: When it ends in any case; what is taken from this machine's processors makes both later.
        """
        plan = list(self.kinds)
        self._chance.shuffle(plan)
        watch = Stopwatch()
        while watch.seconds() < limit:
            if not plan:
                wanted, late = list(lacking()), watch.seconds() >= seconds
                if late and not wanted:
                    return
                plan.append(self._chance.choice(wanted if late else [*wanted, *self._faults]))
            time.sleep(self._chance.uniform(0.5, 1.5) * self.gap_seconds)
            struck = self._faults[plan.pop(0)]()
            if struck is not None:
                self.struck.append(struck)

    def heal(self) -> None:
        """Undo everything, and wait until all parts answer."""
        self.proxy.keep()
        self.stack.revive()

    def refused(self) -> int:
        """How many attempts were told by the ledger that another has their job."""
        lines = [line for worker in self.stack.workers for line in worker.lines()]
        return sum("no longer held under fence" in line for line in lines)

    def _aim(self, *, crash: bool = False) -> Aim | None:
        """Some job that is held, once there is one."""
        watch = Stopwatch()
        while watch.seconds() < _AIM_SECONDS:
            with self.stack.engine.connect() as connection:
                held = connection.execute(_HELD, {"spared": _SPARED_FAILURES, "crash": crash}).all()
            aims = [(row, self.stack.part_of(int(row.lease_owner.rpartition(":")[2]))) for row in held]
            alive = [Aim(row.id, row.fence, part) for row, part in aims if part is not None and part.alive]
            if alive:
                return self._chance.choice(alive)
            time.sleep(0.1)
        return None

    def _kill_worker(self) -> Struck | None:
        aim = self._aim()
        if aim is None:
            return None
        aim.part.kill()
        struck = _at(aim, "kill worker")
        aim.part.start()
        return struck

    def _kill_two_workers(self) -> Struck | None:
        """Two holders in one moment: two pieces of one job, where that is what they compute."""
        aim = self._aim()
        if aim is None:
            return None
        with self.stack.engine.connect() as connection:
            held = connection.execute(_HELD, {"spared": _SPARED_FAILURES, "crash": False}).all()
        parts = [self.stack.part_of(int(row.lease_owner.rpartition(":")[2])) for row in held]
        others = [part for part in parts if part is not None and part.alive and part is not aim.part]
        victims = [aim.part, *others[:1]]
        for part in victims:
            part.send(signal.SIGKILL)
        struck = _at(aim, "kill two workers")
        for part in victims:
            part.kill()
            part.start()
        return struck

    def _kill_rank(self) -> Struck | None:
        """One process of several that compute a job together; of a job with one process, that one."""
        return self._kill_below("kill rank", lambda command: "worker.execution --frames" in command)

    def _kill_child(self) -> Struck | None:
        return self._kill_below("kill child", lambda command: "worker.process.guardian" not in command)

    def _kill_guardian(self) -> Struck | None:
        return self._kill_below("kill guardian", lambda command: "worker.process.guardian" in command)

    def _kill_below(self, fault: str, meant: Callable[[str], bool]) -> Struck | None:
        aim = self._aim(crash=True)
        if aim is None:
            return None
        meaning = [pid for pid in below(aim.part.pid) if meant(command_of(pid))]
        with self.stack.engine.connect() as connection:
            held = connection.execute(_STILL_HELD, {"job": aim.job_id, "fence": aim.fence}).scalar_one()
        if not meaning or not held:  # else they may be another job's, to which this would be the crash too many
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._chance.choice(meaning) if fault == "kill rank" else meaning[0], signal.SIGKILL)
        return _at(aim, fault)

    def _kill_api(self) -> Struck:
        self.stack.api.kill()
        struck = Struck(time.time(), "kill api", "api")
        self.stack.api.start()
        return struck

    def _stop_beyond_lease(self) -> Struck | None:
        """Its child goes on meanwhile; it wakes once another has the job."""
        aim = self._aim()
        if aim is None:
            return None
        aim.part.pause()
        struck = _at(aim, "stop beyond the lease")
        watch, patience = Stopwatch(), max(_PATIENCE_SECONDS, 3 * self.lease_seconds)
        while watch.seconds() < patience and self._still_first(aim):
            time.sleep(0.05)
        aim.part.resume()
        return struck

    def _still_first(self, aim: Aim) -> bool:
        """Whether nobody has taken the job since, and somebody may."""
        row = self.stack.row(aim.job_id)
        return row.fence == aim.fence and row.state not in TERMINAL

    def _pause(self) -> Struck | None:
        aim = self._aim()
        if aim is None:
            return None
        aim.part.pause()
        time.sleep(self._chance.uniform(0.2, 0.5) * self.lease_seconds)
        aim.part.resume()
        return _at(aim, "pause")

    def _sigterm(self) -> Struck | None:
        aim = self._aim()
        if aim is None:
            return None
        aim.part.terminate()
        struck = _at(aim, "sigterm")
        aim.part.ended(_END_SECONDS)
        aim.part.start()
        return struck

    def _flushall(self) -> Struck:
        with self.stack.broker() as broker:
            broker.flushall()
            broker.client_kill_filter(_type="pubsub")  # nobody hears what is sent now
        return Struck(time.time(), "flushall", "redis")

    def _kill_redis(self) -> Struck:
        self.stack.redis.kill()
        struck = Struck(time.time(), "kill redis", "redis")
        time.sleep(self._chance.uniform(0, 2))
        self.stack.redis.restart()
        return struck

    def _restart_postgres(self) -> Struck:
        self.stack.postgres.kill(signal.SIGQUIT)
        struck = Struck(time.time(), "restart postgres", "postgres")
        time.sleep(self._chance.uniform(0, 0.2) * self.lease_seconds)
        self.stack.postgres.restart()
        return struck

    def _terminate_backends(self) -> Struck | None:
        aim = self._aim()
        if aim is None:
            return None
        with self.stack.engine.connect() as connection:
            connection.execute(_TERMINATE, {"name": aim.part.environment["PGAPPNAME"]})
        return _at(aim, "terminate backends")

    def _double_wakeups(self) -> Struck:
        with contextlib.suppress(RedisError, LedgerUnavailable):
            self.stack.send_wakeup(25)
        return Struck(time.time(), "double wake-ups", "redis")

    def _lose_replies(self) -> Struck:
        """Half of what is committed while this lasts is never heard of by those behind the proxy."""
        struck = Struck(time.time(), "lose replies", "postgres")
        self.proxy.lose(0.5, seed=self._chance.randrange(2**32))
        watch, before = Stopwatch(), self.proxy.lost
        while self.proxy.lost < before + 5:
            limit = _PATIENCE_SECONDS if self.proxy.lost == before else self.lease_seconds
            if watch.seconds() > limit:
                break
            time.sleep(0.02)
        self.proxy.keep()
        return struck

    def _silent_database(self) -> Struck:
        """Connections stay open and say nothing, as behind a proxy that hangs or a pooler that is paused."""
        struck = Struck(time.time(), "silent database", "postgres")
        self.proxy.hush()
        time.sleep(self._chance.uniform(0.3, 1.5) * self.lease_seconds)
        self.proxy.keep()
        return struck

    def _redis_a_replica(self) -> Struck:
        """Writes are refused (READONLY), as by a former primary after a failover."""
        struck = Struck(time.time(), "redis a replica", "redis")
        with self.stack.broker() as broker:
            broker.replicaof("127.0.0.1", 1)
            try:
                time.sleep(self._chance.uniform(1, 3))
            finally:
                broker.replicaof("NO", "ONE")
        return struck

    def _redis_full(self) -> Struck:
        """Writes are refused (OOM)."""
        struck = Struck(time.time(), "redis full", "redis")
        with self.stack.broker() as broker:
            before = broker.config_get("maxmemory")["maxmemory"]
            broker.config_set("maxmemory", 1)
            try:
                time.sleep(self._chance.uniform(1, 3))
            finally:
                broker.config_set("maxmemory", before)
        return struck

    def _malformed_messages(self) -> Struck:
        struck = Struck(time.time(), "malformed messages", "redis")
        with self.stack.broker() as broker:
            for each in self._chance.sample(_MALFORMED, 4):
                broker.publish(self.stack.channel, each)
        return struck


def _at(aim: Aim, fault: str) -> Struck:
    return Struck(time.time(), fault, aim.part.name, aim.job_id, aim.fence)


def shown(struck: list[Struck]) -> list[str]:
    """Readable lines, the first fault at 0."""
    told = ((each, [each.fault, each.part, each.job_id, each.fence]) for each in struck)
    return [f"{each.at - struck[0].at:8.2f} {json.dumps(what)}" for each, what in told]
