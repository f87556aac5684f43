"""Metrics of the requests that this process has answered: by route, method and status, with the time to the answer.

Labels come from closed sets: the template of a route and never a path, a known method, a status. So no caller
can create a series.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from starlette.types import Message, Scope

from api.requests.middleware import LIMIT

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_BOUNDS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_NO_ROUTE = "none"
_LIMITS = (
    "queue-full",
    "quota-exceeded",
    "too-many-at-a-time",
    "too-many-long-polls",
    "too-many-refused-keys",
    "too-many-requests",
    "too-many-streams",
)
"""The kinds of problems with status 429."""


# a second series for each one here, which only OpenMetrics has a use for
disable_created_metrics()  # type: ignore[no-untyped-call]


class RequestMetrics:
    """The counts of one process."""

    def __init__(self, waiting: Callable[[], int], connections: Callable[[], int]) -> None:
        """Begin at zero, with functions that return how many long polls wait and how many connections are open now."""
        self.registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "kronoscope_http_requests",
            "Requests answered, by route template, method and status.",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kronoscope_http_request_duration_seconds",
            "Seconds until the answer began; a long poll's waiting counts.",
            ("route", "method"),
            buckets=_BOUNDS_SECONDS,
            registry=self.registry,
        )
        readers = Gauge(
            "kronoscope_http_long_polls", "Requests that wait for news of a job now.", registry=self.registry
        )
        readers.set_function(waiting)
        opened = Gauge("kronoscope_http_connections", "Open connections of clients.", registry=self.registry)
        opened.set_function(connections)
        self._limited = Counter(
            "kronoscope_http_limited", "Requests answered 429, by limit.", ("limit",), registry=self.registry
        )
        for limit in _LIMITS:
            self._limited.labels(limit)
        ProcessCollector(namespace="kronoscope", registry=self.registry)

    def count(self, scope: Scope, message: Message, seconds: float) -> None:
        """Count one answer by its route, where one matched, its method and status, and the seconds until it began."""
        route = getattr(scope.get("route"), "path", None) or _NO_ROUTE
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(route, method, str(message["status"])).inc()
        self._seconds.labels(route, method).observe(seconds)
        if scope.get(LIMIT) is not None:
            self._limited.labels(scope[LIMIT]).inc()
