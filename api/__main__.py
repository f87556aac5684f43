"""The program ``python -P -m api [--with-parent PID]``: serve the API and its dashboard over HTTP.

With ``--with-parent`` it ends when the process that started it has ended (`jobs.parent_process`).
"""

import gc

gc.disable()  # modules that are loaded are no garbage: to look for some takes a seventh of the start

import argparse
import os
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from api.connections.descriptors import BACKLOG, require_descriptors
from api.main import create_app
from api.settings import Settings
from catalog.private_memory import hide_memory
from jobs.errors import LedgerError, LedgerUnavailable, SchemaOutdated
from jobs.parent_process import end_with_parent
from jobs.schema.database import current_database
from jobs.service_log import configure_logging, log_last_words

gc.freeze()
gc.enable()

_SHUTDOWN_SECONDS = 10
_IDLE_SECONDS = 10
"""Longer than clients keep a connection that they may use again."""
_MOST_HEADER_BYTES = 40 * 1024
"""More than the proxy lets through: its answer 431 says what to do."""


class _Server(uvicorn.Server):
    """A server that ends long polls and streams when the process is asked to end."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app
        app.state.connections = self.server_state.connections

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle the signal as uvicorn does, and wake all that wait."""
        service = getattr(self._app.state, "service", None)
        if service is not None:
            service.stopping.set()
        super().handle_exit(sig, frame)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal arrives; return the exit code (3 transient, 4 the operator must act)."""
    parser = argparse.ArgumentParser(prog="api")
    parser.add_argument("--with-parent", type=int, metavar="PID", help="end when the starting process ends")
    parent = parser.parse_args(arguments).with_parent
    if parent is not None:
        end_with_parent(parent)
    hide_memory()
    configure_logging()
    log_last_words()
    try:
        settings = Settings.from_environment(os.environ)
        require_descriptors(settings.connections)
        with current_database(settings.ledger.database_url):
            pass
        app = create_app(settings)
    except LedgerUnavailable as error:
        sys.stderr.write(f"kronoscope api: {error}\n")
        return 3
    except (LedgerError, SchemaOutdated) as error:
        sys.stderr.write(f"kronoscope api: {error}\n")
        return 4
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        backlog=BACKLOG,
        http="h11",
        ws="none",
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        proxy_headers=False,
    )
    server = _Server(config, app)
    server.run()
    return 0 if server.started else 4


if __name__ == "__main__":
    sys.exit(main())
