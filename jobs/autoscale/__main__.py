"""Start workers for waiting jobs through Slurm, Kubernetes, or any command.

python -P -m jobs.autoscale --launcher slurm --classes classes.toml [--once] [--dry-run] [--every 30s]
"""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from catalog.duration import duration_seconds
from jobs.autoscale.autoscaler import Autoscaler, Round
from jobs.autoscale.classes import LAUNCHERS, ClassesFile, read_classes
from jobs.autoscale.decision import Decision
from jobs.autoscale.kubernetes import Kubernetes
from jobs.autoscale.launcher import Launcher
from jobs.autoscale.processes import Processes
from jobs.autoscale.slurm import Slurm
from jobs.errors import LedgerError, LedgerUnavailable, TransientError, UsageError
from jobs.schema.database import current_database
from jobs.service_log import configure_logging, log_last_words
from jobs.settings import ServiceSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the autoscaler."""
    chosen = _parse(arguments)
    told, tell = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(tell, b"!"))
    configure_logging()
    log_last_words()
    try:
        settings = ServiceSettings.from_environment(os.environ)
        file = read_classes(chosen.classes, chosen.launcher, settings.factories_of_any())
        launcher = _launcher(chosen.launcher, file)
        with current_database(settings.ledger.database_url) as engine:
            autoscaler = Autoscaler(engine, launcher, file, settings.ledger.running_jobs)
            if chosen.dry_run or chosen.once:
                return _run_once(autoscaler, dry=chosen.dry_run)
            _run_on(autoscaler, chosen.every, told)
    except LedgerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, UsageError) else 3 if isinstance(error, TransientError) else 4
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m jobs.autoscale", description="Start workers for waiting jobs.")
    parser.add_argument("--launcher", required=True, choices=LAUNCHERS)
    parser.add_argument("--classes", required=True, type=Path, help="TOML file of machine classes")
    parser.add_argument("--once", action="store_true", help="one round, for cron")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started and why, and start nothing")
    parser.add_argument("--every", type=_duration, default=30.0, help="time between two rounds, such as 30s")
    return parser.parse_args(arguments)


def _duration(text: str) -> float:
    seconds = duration_seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write a number with its unit, such as 30s")
    return seconds


def _launcher(name: str, file: ClassesFile) -> Launcher:
    if name == "slurm":
        return Slurm(file.scope)
    return Kubernetes(file.scope) if name == "kubernetes" else Processes(Path(file.logs), file.scope)


def _run_once(autoscaler: Autoscaler, *, dry: bool) -> int:
    done: Round = autoscaler.run_round(dry=dry)
    if dry and done.decision is not None:
        sys.stdout.write("".join(f"{line}\n" for line in describe(done.decision)))
    return 3 if done.failures else 0


def _run_on(autoscaler: Autoscaler, every_seconds: float, told: int) -> None:
    """Run rounds until a signal; machines that were started go on, and end by themselves."""
    log = structlog.get_logger("kronoscope.autoscale")
    log.info("the autoscaler begins", every_seconds=every_seconds)
    while True:
        try:
            autoscaler.run_round()
        except LedgerUnavailable as error:
            log.warning("the database does not answer; the next round asks again", why=str(error))
        if select.select([told], [], [], every_seconds)[0]:
            log.info("the autoscaler ends; its machines go on, and end when nothing is left to do")
            return


def describe(decision: Decision) -> list[str]:
    """Describe a decision for a reader."""
    lines = [
        f"{decision.waiting} waiting; workers that are there or on their way take {decision.covered} of them",
        *(f"{each.name}: would start {each.machines}, since {each.why}" for each in decision.starts),
    ]
    for each in decision.refusals:
        who = f"job {each.example}" + (f" and {each.jobs - 1} like it" if each.jobs > 1 else "")
        if each.name is None:
            lines.append(f"no class can take {who}: {each.why}")
        else:
            lines.append(f"{each.name}: would start none for {who}: {each.why}")
    return [*lines, *(() if decision.starts else ("nothing would be started",))]


if __name__ == "__main__":
    sys.exit(main())
