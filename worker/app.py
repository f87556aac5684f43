"""The Celery app: ``celery -A worker.app worker -P threads`` is a worker of the service.

Celery carries wake-ups and nothing else: every worker hears each of them, and none is kept.
Losing any of it costs seconds, because the database is the queue.
Importing this module reads the broker's address and starts nothing.
"""

import gc

gc.disable()  # modules that are loaded are no garbage: to look for some takes a seventh of the start

import os
import sys
import traceback
from typing import Any

from celery import Celery, signals
from kombu import Queue

from jobs.environment import EnvironmentSource
from jobs.errors import LedgerError
from jobs.queue.wakeups import TRANSPORT_OPTIONS
from worker.service import Service
from worker.settings import WorkerSettings

gc.freeze()
gc.enable()

_DEFAULT_BROKER = "redis://127.0.0.1:6379/0"


class WorkerApp(Celery):  # type: ignore[misc]  # Celery publishes no types
    """The application, and the service whose Agent its messages wake."""

    service: Service | None = None


def create_app(broker: str) -> WorkerApp:
    """Return the application on one broker."""
    celery = WorkerApp("kronoscope", broker=broker)
    celery.conf.update(
        broker_channel_error_retry=True,
        broker_connection_max_retries=None,  # Redis may be away for days: the poll finds the jobs
        broker_connection_retry_on_startup=True,
        broker_heartbeat=0,
        broker_transport="worker.broker_connection:Transport",
        broker_transport_options={**TRANSPORT_OPTIONS, "socket_keepalive": True, "health_check_interval": 15},
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_concurrency=1,  # no task is ever run; jobs run in threads of the Agent's
        worker_consumer="worker.broker_connection:SteadyConsumer",
        worker_enable_remote_control=False,  # any writer to Redis could end every worker by it
        worker_hijack_root_logger=False,
        worker_pool="threads",
        worker_redirect_stdouts=False,
    )
    return celery


_broker = EnvironmentSource(WorkerSettings, os.environ)().get("redis_url") or _DEFAULT_BROKER
app = create_app(_broker)


@signals.celeryd_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _open(instance: Any, **_: object) -> None:  # noqa: ANN401 - Celery publishes no types
    """Take up the ledger before the broker, so that the first line logged is ours."""
    instance.quiet = True  # Celery's banner is not JSON, and it shows the broker's address
    try:
        app.service = Service(WorkerSettings.from_environment(os.environ), _broker)
        if app.service.wakeups is not None:
            exchange = app.service.wakeups.exchange
            app.conf.task_queues = [Queue(exchange.name, exchange, durable=False, no_ack=True)]
    except LedgerError as error:
        sys.stderr.write(f"the worker does not start: {error}\n")
        raise SystemExit(2) from error
    except Exception as error:
        raise _stopped(error) from error


def _stopped(error: Exception) -> SystemExit:
    """Celery logs what a handler of its signals raises, and goes on: as a worker that takes no job."""
    traceback.print_exception(error)
    sys.stderr.write(f"the worker does not start: {type(error).__name__}: {error}\n")
    return SystemExit(4)


@signals.setup_logging.connect(weak=False)  # type: ignore[untyped-decorator]
def _keep_our_logging(**_: object) -> None:
    """Being connected is what keeps Celery from setting up its own."""


@signals.worker_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _start(sender: Any, **_: object) -> None:  # noqa: ANN401 - Celery publishes no types
    """Leave out what Celery's workers tell each other, and take jobs."""
    sender.options.update(without_gossip=True, without_mingle=True, without_heartbeat=True)
    if app.service is not None:
        try:
            app.service.start()
        except Exception as error:
            raise _stopped(error) from error


@signals.worker_shutting_down.connect(weak=False)  # type: ignore[untyped-decorator]
def _begin_drain(**_: object) -> None:
    """Inside Celery's signal handler: only note it."""
    if app.service is not None:
        app.service.agent.begin_drain()


@signals.worker_shutdown.connect(weak=False)  # type: ignore[untyped-decorator]
def _drain(**_: object) -> None:
    if app.service is not None:
        app.service.stop()
        app.service = None
