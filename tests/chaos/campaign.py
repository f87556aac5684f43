"""One campaign: a stack, clients, a nemesis, then healing, draining and the checker's verdict, in one report.

report = run_campaign(seed=7, seconds=30, folder=folder)
assert report.counts and not report.violations
"""

import concurrent.futures
import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, make_url, text

from tests.chaos import audit
from tests.chaos.checker import check
from tests.chaos.evidence import Evidence, gather
from tests.chaos.nemesis import Nemesis, Struck, shown
from tests.chaos.stack.clients import Crowd
from tests.chaos.stack.documents import DIVIDED, PLAIN, RANKS, Pace, Truth, document, undisturbed
from tests.chaos.stack.evil_tenant import EvilTenant, ended_jobs, raise_walls
from tests.chaos.stack.files import Reader, await_sweep
from tests.chaos.stack.proxy import LossyProxy
from tests.chaos.stack.stack import SHORT_LEASES, Stack, running_stack
from tests.machine.stopwatch import Stopwatch

RECLAIMS, REFUSED, UNKNOWN = 5, 1, 1
"""What must have happened at least for a campaign to count."""
KEPT = 2
"""So many jobs were accepted that nobody cancels."""
CHECKPOINTS = {"KRONOSCOPE_CHECKPOINT_SECONDS": "0.5"}
GPUS = {
    "KRONOSCOPE_NODE": "node",
    "KRONOSCOPE_FAKE_GPUS": "4096MiB,4096MiB,4096MiB",
    "KRONOSCOPE_SLOTS": "1",
    "KRONOSCOPE_RESERVE_SECONDS": "3",
}
"""The workers stand on one node and share its made-up GPUs, of which a job of two ranks needs two at once."""
PACE = Pace(batches=24, batch_seconds=0.25, row_seconds=0.35)
_STALL_SECONDS = 180
_SWEEP_SECONDS = 240
_SETTLE_SECONDS = 240
_RELEASE_SECONDS = 120
_PATIENCE = text("ALTER TABLE jobs ALTER COLUMN max_failures SET DEFAULT 100")
"""On a machine that is short of breath a short lease runs out unstruck; that costs time, and is not what is judged."""
_LEFT = text(
    "SELECT count(*) FILTER (WHERE state IN ('queued', 'running', 'waiting', 'cancelling')), sum(event_seq) FROM jobs"
)

_LEASED = text("SELECT count(*) FROM device_leases")
_HAPPENED = text(
    "SELECT (SELECT count(*) - count(DISTINCT job_id) FROM chaos_moves WHERE old_state = 'queued' "
    "AND new_state = 'running') AS again, "
    "(SELECT count(*) FROM chaos_moves WHERE old_state = 'waiting' AND new_state = 'queued') AS joined, "
    "(SELECT count(*) FROM (SELECT 1 FROM chaos_leases GROUP BY job_id, fence HAVING count(*) > 1) AS g) AS groups"
)


@dataclass
class Report:
    """What was done, what came of it, and what was broken."""

    seed: int
    settings: Mapping[str, str]
    attacked_seconds: float = 0.0
    drain_seconds: float = 0.0
    """From healing to the end of the last job."""
    drained: bool = False
    jobs: Mapping[str, int] = field(default_factory=dict)
    """How many ended in which state."""
    evil: Mapping[str, int] = field(default_factory=dict)
    """How many jobs of the tenant that attacks ended in which state."""
    claims: int = 0
    reclaims: int = 0
    refused: int = 0
    """Attempts that were told that another has their job."""
    unknown: int = 0
    """Commits whose reply was lost."""
    joined: int = 0
    """How often a job went on after its last piece."""
    groups: int = 0
    """Claims with more than one device."""
    verified: int = 0
    """How often a listed file was read and compared while all this went on."""
    faults: Mapping[str, int] = field(default_factory=dict)
    recovery_seconds: list[float] = field(default_factory=list)
    """From a fault that hit a holder to the next claim of its job."""
    violations: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    logs: str = ""

    @property
    def counts(self) -> bool:
        """Whether enough has happened for the absence of violations to say anything."""
        enough = self.reclaims >= RECLAIMS and self.refused >= REFUSED and self.unknown >= UNKNOWN
        return enough and self.joined > 0 and self.groups > 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"counts": self.counts}

    def summary(self) -> str:
        """A few lines for whoever runs it."""
        recovered, evil = "", f", evil ones {dict(self.evil)}" if self.evil else ""
        if self.recovery_seconds:
            median, longest = statistics.median(self.recovery_seconds), max(self.recovery_seconds)
            recovered = f"; taken again after {median:.1f} s (median), {longest:.1f} s at most"
        return (
            f"seed {self.seed}: {sum(self.faults.values())} faults in {self.attacked_seconds:.0f} s, jobs "
            f"{dict(self.jobs)}{evil}, {self.claims} claims ({self.reclaims} again), {self.refused} refused, "
            f"{self.unknown} replies to COMMIT lost, {self.joined} rounds of pieces joined, {self.groups} claims "
            f"of two devices, drained in {self.drain_seconds:.0f} s{recovered}"
        )


def run_campaign(
    seed: int,
    seconds: float,
    folder: Path,
    *,
    settings: Mapping[str, str] = SHORT_LEASES | CHECKPOINTS,
    lease_seconds: float = 3,
    gap_seconds: float = 1.0,
    pace: Pace = PACE,
    workers: int = 3,
    limit_seconds: float | None = None,
    drain_seconds: float = 600,
    variants: tuple[int, ...] = (DIVIDED, RANKS, PLAIN),
    evil: bool = False,
) -> Report:
    """Attack a stack of its own and say what came of it.

    Args:
        seed: Of faults, clients and lost replies; processes keep their own time, so no two runs are the same.
        seconds: How long the nemesis rages at least; it goes on where too little has happened to count.
        folder: Logs, artifacts, and the undisturbed runs.
        settings: Of API and workers; ``{}`` for the defaults.
        lease_seconds: The lease under these settings.
        gap_seconds: Between two faults, on average.
        pace: Of the jobs, which must last at least ten gaps.
        workers: How many there are.
        limit_seconds: When the nemesis ends in any case; six times ``seconds`` and four minutes by default.
        drain_seconds: How long the jobs may take once all is healed.
        variants: The jobs that each client submits, in this order, over and over; of the second one the first is
            cancelled.
        evil: Whether a second tenant's jobs attack the others, under workers with the rights of Compose.
    """
    assert pace.seconds >= 10 * gap_seconds, f"jobs of {pace.seconds:g} s are too short for gaps of {gap_seconds:g} s"
    report = Report(seed, dict(settings), logs=str(folder))
    limit = limit_seconds or 6 * seconds + 240
    with (
        attacked_stack(folder, workers, GPUS | dict(settings), raise_walls if evil else None) as (stack, proxy),
        truths(folder, pace, variants) as known,
    ):
        nemesis = Nemesis(stack, proxy, seed, gap_seconds, lease_seconds)
        crowd = Crowd(
            stack.client,
            lambda number, label: document(variants[number % len(variants)], pace, label),
            seed=seed,
            customers=2,
            open_jobs=1,  # so that a worker is free to take what another was made to drop
            cancel_every=3,
            patience_seconds=limit + drain_seconds,
        )
        crowd.start()
        tenant = EvilTenant(stack) if evil else None
        watch = Stopwatch()
        with Reader(stack.engine, stack.artifacts) as reader:
            nemesis.rage(seconds, lambda: _lacking(stack.engine, nemesis, proxy, crowd), limit)
            report.attacked_seconds = watch.seconds()
            crowd.enough()
            if tenant is not None:
                tenant.enough()
            nemesis.heal()
            crowd.settle(_SETTLE_SECONDS)
            report.drain_seconds, report.drained = drain(stack.engine, drain_seconds)
        crowd.leave(_SETTLE_SECONDS)
        await_release(stack.engine)
        report.evil = dict(ended_jobs(stack.engine))
        report.history = crowd.history.shown()
        report.verified = reader.verified
        evidence = gather(stack.engine, crowd.history, known(), stack.artifacts)
        _judge(report, evidence, nemesis, proxy)
        # nothing is under way any more, so that what no row names is nobody's, however young it is
        stack.workers[0].restart(KRONOSCOPE_SWEEP_SECONDS="1", KRONOSCOPE_GRACE_SECONDS="1")
        swept = await_sweep(stack.engine, stack.artifacts, _SWEEP_SECONDS)
        report.violations += sorted(map(str, {*reader.violations, *swept}))
    (folder / "report.json").write_text(json.dumps(report.as_json(), indent=1))
    return report


@contextlib.contextmanager
def attacked_stack(
    folder: Path, workers: int, settings: Mapping[str, str], wall: Callable[[Stack], object] | None = None
) -> Iterator[tuple[Stack, LossyProxy]]:
    """A stack whose API and first worker reach their database through a proxy, with the audit in place."""
    proxies: list[LossyProxy] = []

    def prepare(stack: Stack) -> None:
        audit.install(stack.engine)
        with stack.engine.begin() as connection:
            connection.execute(_PATIENCE)
        if wall is not None:
            wall(stack)
        proxies.append(put_proxy_before(stack, stack.api, stack.workers[0]))

    with running_stack(folder, workers=workers, settings=settings, prepare=prepare) as stack:
        try:
            yield stack, proxies[0]
        finally:
            proxies[0].close()


def put_proxy_before(stack: Stack, *parts: Any) -> LossyProxy:
    """Have these parts, once they are started, reach the database through a proxy; all get a name that it knows."""
    url = make_url(stack.database_url)
    proxy = LossyProxy(str(url.host), int(url.port or 5432))
    for part in stack.parts:
        part.environment["PGAPPNAME"] = part.name
    for part in parts:
        through = url.set(host="127.0.0.1", port=proxy.port)
        part.environment["KRONOSCOPE_DATABASE_URL"] = through.render_as_string(hide_password=False)
    return proxy


@contextlib.contextmanager
def truths(folder: Path, pace: Pace, variants: tuple[int, ...]) -> Iterator[Any]:
    """Undisturbed runs, made beside whatever else goes on; call what this gives to wait for their digests."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        runs = {each: pool.submit(undisturbed, each, pace, folder / f"undisturbed{each}") for each in variants}

        def known() -> dict[int, Truth]:
            return {variant: run.result() for variant, run in runs.items()}

        yield known


def drain(engine: Engine, seconds: float, stall_seconds: float = _STALL_SECONDS) -> tuple[float, bool]:
    """Wait until all jobs have ended, or nothing moves any more; how long it took, and whether they have."""
    watch = Stopwatch()
    before, moved = None, 0.0
    while True:
        with engine.connect() as connection:
            left, drawn = connection.execute(_LEFT).one()
        now = watch.seconds()
        if drawn != before:
            before, moved = drawn, now
        if left == 0 or now > seconds or now - moved > stall_seconds:
            return now, left == 0
        time.sleep(0.1)


def await_release(engine: Engine, seconds: float = _RELEASE_SECONDS) -> None:
    """Wait for devices of attempts of which no process is left; the checker says which are never given back."""
    watch = Stopwatch()
    while watch.seconds() < seconds:
        with engine.connect() as connection:
            if not connection.execute(_LEASED).scalar_one():
                return
        time.sleep(0.2)


def _lacking(engine: Engine, nemesis: Nemesis, proxy: LossyProxy, crowd: Crowd) -> list[str]:
    """Faults that bring about what has not happened often enough yet; none where all has."""
    with engine.connect() as connection:
        happened = connection.execute(_HAPPENED).one()
    faults = []
    if happened.again < RECLAIMS or crowd.kept < KEPT:
        faults.append("kill worker")
    if not happened.joined or not happened.groups:
        faults.append("double wake-ups")  # what disturbs little: pieces have to come to their end
    if nemesis.refused() < REFUSED:
        faults.append("stop beyond the lease")
    if proxy.lost < UNKNOWN:
        faults.append("lose replies")
    return faults


def _judge(report: Report, evidence: Evidence, nemesis: Nemesis, proxy: LossyProxy) -> None:
    report.violations = [str(each) for each in check(evidence)]
    report.jobs = dict(Counter(str(job["state"]) for job in evidence.jobs.values()))
    report.claims = len(evidence.claims)
    report.reclaims = evidence.reclaims
    report.refused = nemesis.refused()
    report.unknown = proxy.lost
    report.joined = sum((each.old_state, each.new_state) == ("waiting", "queued") for each in evidence.moves)
    leased = Counter((each.job_id, each.fence) for each in evidence.leases)
    report.groups = sum(devices > 1 for devices in leased.values())
    report.faults = dict(Counter(each.fault for each in nemesis.struck))
    report.struck = shown(nemesis.struck)
    report.recovery_seconds = [
        round(found, 2) for each in nemesis.struck if (found := _recovery(evidence, each)) is not None
    ]


def _recovery(evidence: Evidence, struck: Struck) -> float | None:
    """Seconds from a fault to the claim after it; None where its job needed none."""
    if struck.job_id is None or struck.fence is None or struck.fault == "pause":
        return None
    states = [event for event in evidence.events[struck.job_id] if event["type"] == "state"]
    claimed = [number for number, event in enumerate(states) if event["data"]["state"] == "running"]
    if len(claimed) <= struck.fence or states[claimed[struck.fence - 1] + 1]["data"]["state"] == "waiting":
        return None  # a job that was divided all the same is taken again after its pieces
    return float(states[claimed[struck.fence]]["at"].timestamp() - struck.at)
