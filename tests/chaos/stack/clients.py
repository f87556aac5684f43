"""Clients of a service under attack: they submit, cancel and look, and keep a history of what they were told.

Every intention has an idempotency key and is put again, with the same key, until its outcome is
known: ``ok`` (accepted, under which id), ``failed`` (refused for good), ``unknown`` (no answer, or a
server's error: it may have happened or not).
"""

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from tests.machine.stopwatch import Stopwatch, until

Action = Literal["submit", "cancel", "look"]
Outcome = Literal["ok", "failed", "unknown"]
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
_AGAIN_SECONDS = 0.3


@dataclass(frozen=True)
class Entry:
    """One answer, or the lack of one."""

    at: float
    action: Action
    key: str
    outcome: Outcome
    job_id: str | None = None
    told: str | None = None
    """The state that the answer named, or what went wrong."""


@dataclass
class History:
    """Everything the clients were told, in the order in which they heard it."""

    entries: list[Entry] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, entry: Entry) -> Entry:
        with self._lock:
            self.entries.append(entry)
        return entry

    def of(self, action: str, outcome: Outcome | None = None) -> list[Entry]:
        with self._lock:
            return [each for each in self.entries if each.action == action and outcome in (None, each.outcome)]

    @property
    def accepted(self) -> dict[str, set[str]]:
        """Which ids each key was answered with."""
        found: dict[str, set[str]] = {}
        for entry in self.of("submit", "ok"):
            found.setdefault(entry.key, set()).add(str(entry.job_id))
        return found

    @property
    def cancelled(self) -> set[str]:
        """Ids of jobs that somebody asked to cancel, heard or not."""
        return {str(entry.job_id) for entry in self.of("cancel")}

    def shown(self) -> list[str]:
        """Readable lines; looks that only repeat what was seen are left out."""
        lines, seen = [], {}
        for entry in list(self.entries):
            if entry.action == "look" and seen.get(entry.key) == (entry.outcome, entry.told):
                continue
            seen[entry.key] = (entry.outcome, entry.told)
            lines.append(f"{entry.at:8.2f} {entry.action:6} {entry.key} {entry.outcome} {entry.job_id} {entry.told}")
        return lines


class Customer:
    """One intention after another, each to its known outcome."""

    def __init__(self, client: httpx.Client, history: History, began: float, patience_seconds: float) -> None:
        self._client = client
        self._history = history
        self._began = began
        self._patience_seconds = patience_seconds
        self._watch = Stopwatch()

    def submit(self, key: str, document: Mapping[str, Any], times: int = 1) -> str | None:
        """Put the job until its fate is known, ``times`` over; the id, or None where it has none."""
        job_id = None
        for _ in range(times):
            entry = self._insist(
                "submit",
                key,
                None,
                lambda: self._client.post("/v1/jobs", json=document, headers={"idempotency-key": key}),
            )
            job_id = entry.job_id if entry.outcome == "ok" else job_id
        return job_id

    def cancel(self, key: str, job_id: str) -> None:
        self._insist("cancel", key, job_id, lambda: self._client.post(f"/v1/jobs/{job_id}:cancel"))

    def look(self, key: str, job_id: str) -> Entry:
        """Once; nobody who waits needs every answer."""
        return self._history.add(self._ask("look", key, job_id, lambda: self._client.get(f"/v1/jobs/{job_id}")))

    def _insist(self, action: Action, key: str, job_id: str | None, send: Callable[[], httpx.Response]) -> Entry:
        while True:
            entry = self._history.add(self._ask(action, key, job_id, send))
            if entry.outcome != "unknown" or self._watch.seconds() > self._patience_seconds:
                return entry
            time.sleep(_AGAIN_SECONDS)

    def _ask(
        self,
        action: Action,
        key: str,
        job_id: str | None,
        send: Callable[[], httpx.Response],
    ) -> Entry:
        try:
            answer = send()
        except httpx.TransportError as error:
            return Entry(self._now(), action, key, "unknown", job_id, type(error).__name__)
        if answer.is_success:
            job = answer.json()
            return Entry(self._now(), action, key, "ok", job["id"], job["state"])
        # 409: another request with the same key is under way; 429: later
        later = answer.status_code >= 500 or answer.status_code in (408, 409, 429)
        return Entry(
            self._now(),
            action,
            key,
            "unknown" if later else "failed",
            job_id,
            f"{answer.status_code} {answer.text[:120]}",
        )

    def _now(self) -> float:
        return time.monotonic() - self._began


class Crowd:
    """Customers in threads of their own, who keep some jobs open until they are told to stop."""

    def __init__(
        self,
        client: Callable[[], httpx.Client],
        document: Callable[[int, str], Mapping[str, Any]],
        *,
        seed: int,
        customers: int,
        open_jobs: int,
        cancel_every: int,
        patience_seconds: float,
    ) -> None:
        """``document(number, label)`` makes the job of one intention; each customer keeps ``open_jobs`` open.

        Of the jobs of each, one in ``cancel_every`` is cancelled a while later.
        """
        self.history = History()
        self.began = time.monotonic()
        self._client = client
        self._document = document
        self._open_jobs = open_jobs
        self._cancel_every = cancel_every
        self._patience_seconds = patience_seconds
        self._enough = threading.Event()
        self._gone = threading.Event()
        self._faults: list[BaseException] = []
        self._settled = [threading.Event() for _ in range(customers)]
        self._kept: list[str] = []
        self._threads = [
            threading.Thread(target=self._live, args=(number, random.Random(f"{seed} {number}")), daemon=True)
            for number in range(customers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def kept(self) -> int:
        """How many jobs were accepted that nobody is going to cancel."""
        return len(self._kept)

    def enough(self) -> None:
        """No new jobs; those that are open are waited for."""
        self._enough.set()

    def settle(self, seconds: float) -> None:
        """Wait, after that, until no request to submit or cancel is under way: what has no answer may yet be done."""
        until(lambda: all(each.is_set() for each in self._settled), seconds, "every request is answered")

    def leave(self, seconds: float) -> None:
        """Stop looking.

        Raises:
            BaseException: What ended a customer early.
        """
        self._enough.set()
        self._gone.set()
        for thread in self._threads:
            thread.join(seconds)
        if self._faults:
            raise self._faults[0]

    def _live(self, number: int, chance: random.Random) -> None:
        try:
            with self._client() as client:
                self._spend(number, chance, Customer(client, self.history, self.began, self._patience_seconds))
        except BaseException as fault:  # a customer who vanishes would be a test that checks less
            self._faults.append(fault)
            raise
        finally:
            self._settled[number].set()

    def _spend(self, number: int, chance: random.Random, customer: Customer) -> None:
        open_jobs: dict[str, str] = {}
        count = 0
        while not self._gone.is_set():
            while len(open_jobs) < self._open_jobs and not self._enough.is_set():
                key = f"c{number}-{count}"
                regretted = (count + number) % self._cancel_every == 1  # the second customer's first is one
                # now and then the same request twice, as a client does that lost track
                job_id = customer.submit(key, self._document(count, key), times=2 if chance.random() < 0.2 else 1)
                count += 1
                if job_id is not None:
                    open_jobs[key] = job_id
                    if regretted:
                        self._gone.wait(chance.uniform(0, 6))
                        customer.cancel(key, job_id)
                    else:
                        self._kept.append(job_id)
            if self._enough.is_set():
                self._settled[number].set()
            for key, job_id in list(open_jobs.items()):
                entry = customer.look(key, job_id)
                if entry.outcome == "ok" and entry.told in TERMINAL:
                    del open_jobs[key]
            self._gone.wait(chance.uniform(0.2, 0.6))
