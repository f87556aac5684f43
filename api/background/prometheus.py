"""A census of the ledger as Prometheus reads it: every name begins with ``kronoscope_`` and ends in its unit.

Whatever has a known set of labels is there from the first scrape on, at zero: of a series that appears with its
first event, `increase()` sees nothing.
"""

from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jobs.devices.registry import DeviceKind, DeviceStatus
from jobs.lifecycle import TERMINAL
from jobs.metrics.snapshot import Census

_CATEGORIES = ("fatal", "transient", "usage")


class LedgerMetrics(Collector):
    """One scrape's view of the ledger; None where the database did not answer."""

    def __init__(self, census: Census | None) -> None:
        self._census = census

    def collect(self) -> Iterable[Metric]:
        """Every family."""
        up = self._census is not None
        yield GaugeMetricFamily("kronoscope_database_up", "Whether the ledger's database answers.", float(up))
        if self._census is not None:
            yield from _queue(self._census)
            yield from _workers(self._census)
            yield from _devices(self._census.devices)
            yield from _totals(self._census)


def _queue(census: Census) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("kronoscope_jobs", "Jobs that have not ended.", labels=["state"])
    for state, count in census.active_jobs.items():
        jobs.add_metric([state], count)
    yield jobs
    yield GaugeMetricFamily(
        "kronoscope_queue_oldest_age_seconds",
        "How long the job that has waited longest has been in the queue.",
        census.queue_oldest_seconds,
    )
    yield GaugeMetricFamily(
        "kronoscope_leases_expired", "Jobs whose holder is silent and that nobody has taken yet.", census.leases_expired
    )
    yield GaugeMetricFamily(
        "kronoscope_doorbells_unsent", "Queued jobs for which no doorbell rang yet.", census.doorbells_unsent
    )
    yield GaugeMetricFamily(
        "kronoscope_doorbells_oldest_unsent_age_seconds",
        "Age of the oldest of them.",
        census.doorbells_oldest_unsent_seconds,
    )
    rounds = GaugeMetricFamily(
        "kronoscope_reconciler_last_round_age_seconds",
        "Seconds since a round of this reconciler ended well, in any process.",
        labels=["reconciler"],
    )
    for reconciler, seconds in census.seconds_since_round.items():
        rounds.add_metric([reconciler], seconds)
    yield rounds


def _workers(census: Census) -> Iterator[Metric]:
    yield GaugeMetricFamily("kronoscope_workers", "Workers that were seen lately.", census.workers)
    slots = GaugeMetricFamily("kronoscope_worker_slots", "Jobs that they can do at once.", labels=["state"])
    busy = min(census.slots, census.slots_busy)
    slots.add_metric(["busy"], busy)
    slots.add_metric(["idle"], census.slots - busy)
    yield slots


def _devices(devices: Iterable[DeviceStatus]) -> Iterator[Metric]:
    """By kind: a device's UUID and name say which machine it is, and there may be many."""
    known = GaugeMetricFamily("kronoscope_devices", "Devices that a worker offers.", labels=["kind"])
    memory = GaugeMetricFamily(
        "kronoscope_device_memory_bytes", "Their memory, by who has it.", labels=["kind", "state"]
    )
    draining = GaugeMetricFamily(
        "kronoscope_device_leases_draining",
        "Leases of devices whose attempt writes nothing any more, and whose processes are not known to be gone.",
        labels=["kind"],
    )
    for kind in get_args(DeviceKind):
        offered = [device for device in devices if device.kind == kind and not device.stale]
        known.add_metric([kind], len(offered))
        draining.add_metric([kind], sum(device.draining for device in devices if device.kind == kind))
        for state in ("free", "leased", "foreign"):
            memory.add_metric([kind, state], sum(getattr(device, f"{state}_bytes") for device in offered))
    yield from (known, memory, draining)


def _totals(census: Census) -> Iterator[Metric]:
    counters = census.counters
    moves = counters.get("moves", {})
    yield _total("kronoscope_attempts", "Claims of jobs by workers.", moves.get("running", 0))
    ended = CounterMetricFamily("kronoscope_jobs_ended", "Jobs that have ended.", labels=["state"])
    for state in sorted(TERMINAL):
        ended.add_metric([state], moves.get(state, 0))
    yield ended
    failed = CounterMetricFamily(
        "kronoscope_jobs_failed", "Jobs that ended failed, by who must act.", labels=["category"]
    )
    for category in _CATEGORIES:
        failed.add_metric([category], counters.get("job_failures", {}).get(category, 0))
    yield failed
    attempts = CounterMetricFamily(
        "kronoscope_attempts_failed", "Attempts that failed, by who must act and why.", labels=["category", "code"]
    )
    for label, count in sorted(counters.get("attempt_failures", {}).items()):
        attempts.add_metric(label.split(" ", 1), count)
    yield attempts
    yield _total("kronoscope_attempts_drained", "Attempts handed back.", counters.get("drains", {}).get("", 0))
    yield _total("kronoscope_leases_reaped", "Jobs taken from silent workers.", counters.get("reaped", {}).get("", 0))
    yield _total(
        "kronoscope_fenced_writes",
        "Writes refused because their attempt no longer held the job.",
        counters.get("refused_writes", {}).get("", 0),
    )


def _total(name: str, what: str, value: int) -> Metric:
    return CounterMetricFamily(name, what, value)
