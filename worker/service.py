"""The service of a worker process from start to end, with a broker that sends wake-ups or without one."""

import os
import time
from collections.abc import Callable

import structlog

from catalog.private_memory import hide_memory
from jobs.schema.database import open_database, require_current_schema
from jobs.service_log import configure_logging, log_last_words
from jobs.tenancy.shared_workers import require_walls
from worker.agent.agent import Agent
from worker.agent.isolation import measure_isolation
from worker.agent.maintenance import WorkerMaintenance
from worker.agent.pace_measurement import PaceMeasurement
from worker.agent.shared_folders import share_folders
from worker.agent.trial_job import trial_job, with_possible_namespaces
from worker.devices.device_summary import describe_device
from worker.devices.discover import process_space
from worker.lifetime import Ending
from worker.settings import WorkerSettings


class Service:
    """Agent and maintenance over one database connection pool."""

    def __init__(
        self,
        settings: WorkerSettings,
        send_wakeup: Callable[[str], object] | None = None,
        broker_backlog: Callable[[], int] = lambda: 0,
    ) -> None:
        """Open the ledger."""
        began = time.monotonic()  # the machine is not lent for longer because it took long to start
        configure_logging(settings.log_level)
        log_last_words()
        log = structlog.get_logger("kronoscope.worker")
        log.info("worker starts", device=describe_device(), slots=settings.slots, wakeups=send_wakeup is not None)
        hide_memory()
        if settings.child_user is not None:
            share_folders(settings.ledger.artifact_root, settings.model_store)
        settings.ledger.artifact_root.mkdir(parents=True, exist_ok=True)
        settings = with_possible_namespaces(settings)
        with trial_job(settings) as job, trial_job(settings, 1) as neighbour:
            isolation = measure_isolation(job, os.environ, settings.ledger.artifact_root, neighbour)
        log.info("isolation of jobs", holds=isolation)
        self._engine = open_database(settings.ledger.database_url)
        require_current_schema(self._engine)
        self.agent = Agent(self._engine, settings, isolation=isolation)
        require_walls(self._engine, self.agent.isolation)
        self._maintenance = WorkerMaintenance(
            *(self._engine, settings.ledger, send_wakeup, broker_backlog),
            process_space=process_space(settings.node),
            wake=self.agent.wake,
        )
        self._pace = PaceMeasurement(settings)
        self._ending = Ending(settings.lifetime, self.agent.idle, began)
        self._log = log

    def start(self) -> None:
        """Take jobs from now on."""
        self.agent.start()
        self._maintenance.start()
        self._pace.start()
        self._ending.start()

    def stop(self) -> None:
        """Hand running jobs back and let go of the database."""
        self._pace.stop()
        drained = self.agent.drain()
        self._maintenance.stop()
        self._log.info("worker ends", drained=drained)
        self._engine.dispose()
