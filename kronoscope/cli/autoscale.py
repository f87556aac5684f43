"""The command ``kronoscope autoscale``: starts workers for waiting jobs."""

from pathlib import Path
from typing import Annotated

import typer

from kronoscope.cli.options import complete, one_of
from kronoscope.cli.serve import exec_module

_LAUNCHERS = ("slurm", "kubernetes", "command")


def autoscale(
    launcher: Annotated[
        str,
        typer.Option(
            metavar="LAUNCHER",
            parser=one_of(_LAUNCHERS),
            autocompletion=complete(_LAUNCHERS),
            help="What lends the machines: slurm, kubernetes or command.",
        ),
    ],
    classes: Annotated[Path, typer.Option(help="TOML file of machine classes, each with its template.")],
    once: Annotated[bool, typer.Option("--once", help="One round, for cron.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started and why, and start nothing.")
    ] = False,
    every: Annotated[str, typer.Option(metavar="30s", help="Time between two rounds.")] = "30s",
) -> None:
    """Start workers for the jobs that wait in the service's database, and let them leave when nothing is left to do."""
    flags = [*(["--once"] if once else []), *(["--dry-run"] if dry_run else [])]
    words = ["--launcher", launcher, "--classes", str(classes), "--every", every, *flags]
    raise typer.Exit(exec_module("jobs.autoscale.__main__", words))
