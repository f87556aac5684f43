"""One round of the autoscaler: look at the launcher, decide in one transaction, start what was decided.

What it knows is in the ledger and in the launcher's queue, nothing in the process: it may be ended at any point and
run again, once by cron or for ever, and twice at the same time.
"""

from collections.abc import Sequence

import structlog
from sqlalchemy import Engine

from catalog.record import record
from jobs.autoscale.classes import ClassesFile
from jobs.autoscale.decision import Decision, Refusal, decide
from jobs.autoscale.demand import read_rooms, read_waiting
from jobs.autoscale.launcher import Launcher, NewMachine
from jobs.autoscale.machines import (
    Change,
    ask_for,
    class_states,
    deciding,
    follow,
    note_failed,
    note_started,
    offer,
    outstanding,
)
from jobs.errors import LauncherFailed
from jobs.queue.reaper import reap_expired
from jobs.schema.identifiers import new_id


@record
class Round:
    """The observations and actions of one round."""

    decision: Decision | None
    """None where the launcher did not answer: nothing is started then, as it may have machines already."""
    failures: int
    """Questions and starts that the launcher has refused."""


class Autoscaler:
    """Starts machines of some classes through one launcher."""

    def __init__(self, engine: Engine, launcher: Launcher, file: ClassesFile, most_running: int) -> None:
        """Get ready."""
        self._engine = engine
        self._launcher = launcher
        self._file = file
        self._classes = {each.name: each for each in file.classes}
        self._most_running = most_running
        self._said: set[tuple[str | None, str]] = set()
        self._log = structlog.get_logger("kronoscope.autoscale").bind(scope=launcher.scope)

    def run_round(self, *, dry: bool = False) -> Round:
        """Look, decide, and start machines."""
        scope = self._launcher.scope
        if not dry:
            reap_expired(self._engine)  # where all workers are gone, a job of a killed one waits to be seen
        seen_at, known = outstanding(self._engine, scope)
        try:
            lent = self._launcher.lent(known)
        except LauncherFailed as error:
            self._log.warning("the launcher does not answer; nothing is started", why=str(error))
            return Round(decision=None, failures=1)
        new: list[tuple[str, str]] = []
        with deciding(self._engine, keep=not dry) as connection:
            changes = follow(connection, scope, lent, seen_at)
            offer(connection, scope, self._file.classes)
            states = class_states(connection, scope, self._file.classes)
            decision = decide(read_waiting(connection, self._most_running), read_rooms(connection), states)
            for start in decision.starts:
                for _ in range(start.machines):
                    new.append((new_id(), start.name))
                    ask_for(connection, scope, *new[-1], start.why)
        if dry:
            return Round(decision=decision, failures=0)
        self._log_changes(changes)
        self._log_refusals(decision.refusals)
        return Round(decision=decision, failures=self._start(new, {each.name: each.why for each in decision.starts}))

    def _start(self, new: Sequence[tuple[str, str]], reasons: dict[str, str]) -> int:
        """Start machines; after one that fails no other of its class is tried before the cool-down has passed."""
        failed: dict[str, str] = {}
        for machine_id, name in new:
            chosen = self._classes[name]
            if name in failed:
                note_failed(self._engine, machine_id, f"not tried after another: {failed[name]}")
                continue
            try:
                handle = self._launcher.start(
                    NewMachine(
                        id=machine_id,
                        class_name=name,
                        script=chosen.script(machine_id, self._file.worker),
                        wall_seconds=chosen.wall_seconds,
                    )
                )
            except LauncherFailed as error:
                failed[name] = str(error)
                note_failed(self._engine, machine_id, str(error))
                self._log.error(
                    "no machine could be started; tried again after the cool-down",
                    machine=machine_id,
                    machine_class=name,
                    why=str(error),
                )
            else:
                note_started(self._engine, machine_id, handle)
                self._log.info(
                    "a machine is started",
                    machine=machine_id,
                    machine_class=name,
                    handle=handle,
                    why=reasons[name],
                )
        return len(failed)

    def _log_changes(self, changes: Sequence[Change]) -> None:
        for each in changes:
            seen = {"machine": each.id, "machine_class": each.class_name, "handle": each.handle, "state": each.state}
            if each.state in ("ended", "failed") and not each.joined:
                self._log.error("a machine is gone whose worker never registered; the cool-down doubles", **seen)
            else:
                self._log.info("a machine has another state", **seen)

    def _log_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Say each once, until it has not been so for a round."""
        present = {(each.name, each.example) for each in refusals}
        for each in refusals:
            if (each.name, each.example) not in self._said:
                said = {"job": each.example, "jobs": each.jobs, "why": each.why}
                if each.name is None:
                    self._log.warning("no class of machines can take jobs", **said)
                else:
                    self._log.info("jobs wait for a machine", machine_class=each.name, **said)
        self._said = present
