"""The program ``python -P -m api``: serve the API and its dashboard over HTTP."""

import asyncio
import os
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.live.event_stream import TRANSPORT
from api.main import create_app
from api.settings import Settings
from jobs.errors import LedgerError, LedgerUnavailable, SchemaOutdated
from jobs.schema.database import open_database, require_current_schema
from jobs.service_log import configure_logging, log_last_words

_KEEP_ALIVE_SECONDS = 10
_SHUTDOWN_SECONDS = 10


class _Protocol(H11Protocol):
    """A protocol that lets a stream cut the connection of a reader that takes nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Pass the connection to every request on it."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, TRANSPORT: transport}


class _Server(uvicorn.Server):
    """A server that ends long polls and streams as soon as the process is asked to end."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle the signal as uvicorn does, and wake all that wait."""
        service = getattr(self._app.state, "service", None)
        if service is not None:
            service.stopping.set()
        super().handle_exit(sig, frame)


def main() -> int:
    """Serve until a signal arrives; return the exit code (3 transient, 4 the operator must act)."""
    configure_logging()
    log_last_words()
    try:
        settings = Settings.from_environment(os.environ)
        engine = open_database(settings.ledger.database_url)
        try:
            require_current_schema(engine)
        finally:
            engine.dispose()
    except LedgerUnavailable as error:
        sys.stderr.write(f"kronoscope api: {error}\n")
        return 3
    except (LedgerError, SchemaOutdated) as error:
        sys.stderr.write(f"kronoscope api: {error}\n")
        return 4
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        # a header that never ends is cut here; the body's limits are the routes'
        http=_Protocol,
        h11_max_incomplete_event_size=32 * 1024,
        proxy_headers=False,
    )
    server = _Server(config, app)
    server.run()
    return 0 if server.started else 4


if __name__ == "__main__":
    sys.exit(main())
