"""The command ``kronoscope worker``."""

import os
from typing import Annotated

import typer

from kronoscope.cli.serve import exec_module


def worker(
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End once nothing is queued that it could take, and nothing runs here.")
    ] = False,
    wall: Annotated[
        str | None,
        typer.Option(metavar="4h", help="When its machine is taken away, from now on; Slurm says it itself."),
    ] = None,
    drain_before: Annotated[
        str | None, typer.Option(metavar="10m", help="How long before that its jobs are handed back and it has ended.")
    ] = None,
) -> None:
    """Run a worker of the service, with its KRONOSCOPE_* settings: wake-ups come from Redis."""
    options = {
        "KRONOSCOPE_UNTIL_IDLE": "1" if until_idle else None,
        "KRONOSCOPE_WALL": wall,
        "KRONOSCOPE_DRAIN_BEFORE": drain_before,
    }
    os.environ.update({name: value for name, value in options.items() if value is not None})  # Celery reads the command
    raise typer.Exit(exec_module("celery", ["-A", "worker.app", "worker", "-P", "threads"], extra="worker"))
