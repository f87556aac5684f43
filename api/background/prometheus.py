"""Prometheus metrics of the ledger: every name begins with ``kronoscope_`` and ends in its unit.

A metric with a known set of labels is there from the first scrape on, at zero: `increase()` misses the first event of a
series that appears with it.
"""

from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jobs.devices.registry import DeviceKind, DeviceStatus
from jobs.lifecycle import TERMINAL
from jobs.metrics.counters import Counter
from jobs.metrics.snapshot import LedgerSnapshot

_CATEGORIES = ("fatal", "transient", "usage")
_TOTALS: tuple[tuple[Counter, str, str], ...] = (
    ("drains", "attempts_drained", "Attempts handed back."),
    ("reaped", "leases_reaped", "Jobs reclaimed from silent workers."),
    ("refused_writes", "fenced_writes", "Writes refused because their attempt no longer held the job."),
)


class LedgerMetrics(Collector):
    """The metrics of one scrape, made of a snapshot of the ledger; None where the database did not answer."""

    def __init__(self, snapshot: LedgerSnapshot | None) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """Yield every metric family."""
        up = self._snapshot is not None
        yield GaugeMetricFamily("kronoscope_database_up", "Whether the ledger's database answers.", float(up))
        if self._snapshot is not None:
            yield from _queue(self._snapshot)
            yield from _workers(self._snapshot)
            yield from _devices(self._snapshot.devices)
            yield from _totals(self._snapshot)


def _queue(snapshot: LedgerSnapshot) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("kronoscope_jobs", "Jobs that have not ended.", labels=["state"])
    for state, count in snapshot.active_jobs.items():
        jobs.add_metric([state], count)
    yield jobs
    yield GaugeMetricFamily(
        "kronoscope_queue_oldest_age_seconds",
        "Age of the oldest job in the queue.",
        snapshot.queue_oldest_seconds,
    )
    yield GaugeMetricFamily(
        "kronoscope_leases_expired",
        "Jobs with an expired lease that were not reclaimed yet.",
        snapshot.leases_expired,
    )
    rounds = GaugeMetricFamily(
        "kronoscope_reconciler_last_round_age_seconds",
        "Seconds since the last successful round of this reconciler, in any process.",
        labels=["reconciler"],
    )
    for reconciler, seconds in snapshot.seconds_since_round.items():
        rounds.add_metric([reconciler], seconds)
    yield rounds


def _workers(snapshot: LedgerSnapshot) -> Iterator[Metric]:
    yield GaugeMetricFamily("kronoscope_workers", "Workers that were seen lately.", snapshot.workers)
    slots = GaugeMetricFamily("kronoscope_worker_slots", "Jobs that they can run at once.", labels=["state"])
    busy = min(snapshot.slots, snapshot.slots_busy)
    slots.add_metric(["busy"], busy)
    slots.add_metric(["idle"], snapshot.slots - busy)
    yield slots


def _devices(devices: Iterable[DeviceStatus]) -> Iterator[Metric]:
    """Yield device metrics by kind alone: UUID and name would identify a machine, and there may be many."""
    offered_devices = GaugeMetricFamily("kronoscope_devices", "Devices that a worker offers.", labels=["kind"])
    memory = GaugeMetricFamily("kronoscope_device_memory_bytes", "Their memory, by its use.", labels=["kind", "state"])
    draining = GaugeMetricFamily(
        "kronoscope_device_leases_draining",
        "Leases of devices whose attempt has lost its job, and whose processes are not known to have ended.",
        labels=["kind"],
    )
    for kind in get_args(DeviceKind):
        offered = [device for device in devices if device.kind == kind and not device.stale]
        offered_devices.add_metric([kind], len(offered))
        draining.add_metric([kind], sum(device.draining for device in devices if device.kind == kind))
        for state in ("free", "leased", "foreign"):
            memory.add_metric([kind, state], sum(getattr(device, f"{state}_bytes") for device in offered))
    yield from (offered_devices, memory, draining)


def _totals(snapshot: LedgerSnapshot) -> Iterator[Metric]:
    counters = snapshot.counters
    moves = counters.get("moves", {})
    yield CounterMetricFamily("kronoscope_attempts", "Claims of jobs by workers.", moves.get("running", 0))
    ended = CounterMetricFamily("kronoscope_jobs_ended", "Jobs that have ended.", labels=["state"])
    for state in sorted(TERMINAL):
        ended.add_metric([state], moves.get(state, 0))
    yield ended
    failed = CounterMetricFamily("kronoscope_jobs_failed", "Jobs that have failed, by category.", labels=["category"])
    for category in _CATEGORIES:
        failed.add_metric([category], counters.get("job_failures", {}).get(category, 0))
    yield failed
    attempts = CounterMetricFamily(
        "kronoscope_attempts_failed", "Attempts that failed, by category and code.", labels=["category", "code"]
    )
    for label, count in sorted(counters.get("attempt_failures", {}).items()):
        attempts.add_metric(label.split(" ", 1), count)
    yield attempts
    for counter, name, what in _TOTALS:
        yield CounterMetricFamily(f"kronoscope_{name}", what, counters.get(counter, {}).get("", 0))
