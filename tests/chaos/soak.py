"""The whole kill matrix with the default leases, and a campaign: ``make soak``.

    python -m tests.chaos.soak [--stacks N] [--only PART:POINT …] [--campaign-seconds S] [--seed N]

Every cell kills one part at one point and waits for the job to end as if nothing had happened. An embedded service,
whose cells are named `embedded-PROCESS:POINT`, has its own: there the others leave, and the next start goes on.
Prints how long recovery took by part and by point, writes benchmarks/results/soak.json, and ends
with exit code 1 where a cell failed or one took longer than a minute.
"""

import argparse
import concurrent.futures
import functools
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results_file import claim, not_measured, write
from tests import servers
from tests.chaos.campaign import Report, run_campaign
from tests.chaos.cells import ALL_CELLS, PARTS, Recovery, matrix_stack, run_cell
from tests.chaos.embedded_cells import CELLS as EMBEDDED_CELLS
from tests.chaos.embedded_cells import run_embedded_cell
from tests.chaos.stack.documents import VARIANTS, Pace
from tests.chaos.stack.embedded import PROCESSES, embedded_service
from tests.chaos.stack.gated_jobs import document, outcomes

MOST_SECONDS, MEDIAN_SECONDS = 20, 10
"""From the kill to a living holder's first write: the host notices, and no lease (45 s) has to run out."""
CELL_SECONDS = 240
EMBEDDED = "embedded-"
EMBEDDED_PARTS = tuple(f"{EMBEDDED}{process}" for process in PROCESSES)
EVERY_CELL = (*ALL_CELLS, *((f"{EMBEDDED}{process}", point) for process, point in EMBEDDED_CELLS))
EVERY_POINT = tuple(dict.fromkeys(point for _, point in EVERY_CELL))
GAP_SECONDS = 6.0
"""Between two faults of the campaign, on average."""
DOWN_SECONDS = 5.0
"""How long API, Redis and PostgreSQL stay away."""


class Soak:
    """Cells shared out among stacks that run side by side, and one embedded service with cells of its own."""

    def __init__(self, cells: Sequence[tuple[str, str]], embedded: Sequence[tuple[str, str]]) -> None:
        self._embedded_cells = embedded
        self.recoveries: list[Recovery] = []
        self.failed: list[dict[str, str]] = []
        self.given_up = threading.Event()
        """Set where nobody waits any more: every stack ends its own processes after the cell under way."""
        self._left: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        for cell in _longest_first(cells):
            self._left.put(cell)

    def run(self, stacks: int) -> None:
        """Run every cell."""
        threads = [threading.Thread(target=self._stack, args=(number,)) for number in range(stacks)]
        threads.append(threading.Thread(target=self._embedded))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while not self._left.empty():
            self._fail(*self._left.get(), "no stack was left to run it")

    def _stack(self, number: int) -> None:
        if self._left.empty():
            return
        with tempfile.TemporaryDirectory(prefix=f"kronoscope-soak-{number}-") as folder:
            try:
                with matrix_stack(Path(folder)) as stack:
                    job_id = stack.submit(document())
                    stack.await_end(job_id)
                    undisturbed = outcomes(stack, job_id)
                    while not self.given_up.is_set():
                        try:
                            part, point = self._left.get_nowait()
                        except queue.Empty:
                            return
                        timed = functools.partial(run_cell, down=DOWN_SECONDS, seconds=CELL_SECONDS, timed=True)
                        self._run_cell(part, point, functools.partial(timed, stack, part, point, undisturbed))
            except Exception:  # noqa: BLE001 - a stack that cannot go on leaves its cells to the others
                _say(f"stack {number} ended early:\n{traceback.format_exc(limit=3)}")

    def _embedded(self) -> None:
        left = list(self._embedded_cells)
        if not left:
            return
        with tempfile.TemporaryDirectory(prefix="kronoscope-soak-embedded-") as folder:
            try:
                with embedded_service(Path(folder)) as service:
                    job_id = service.submit(document())
                    service.await_end(job_id)
                    undisturbed = outcomes(service, job_id)
                    while left and not self.given_up.is_set():
                        part, point = left.pop(0)
                        process = part.removeprefix(EMBEDDED)
                        cell = functools.partial(run_embedded_cell, service, process, point, undisturbed)
                        self._run_cell(part, point, cell)
            except Exception:  # noqa: BLE001 - as for a stack
                _say(f"the embedded service ended early:\n{traceback.format_exc(limit=3)}")
        for cell in left:
            self._fail(*cell, "no service was left to run it")

    def _run_cell(self, part: str, point: str, cell: Callable[[], Recovery]) -> None:
        try:
            recovery = cell()
        except Exception:  # noqa: BLE001 - one cell's failure is a result, and the others run on
            self._fail(part, point, traceback.format_exc(limit=3))
        else:
            self.recoveries.append(recovery)
            _say(
                f"{part:17} {point:16} running again after {recovery.running_again:5.1f} s, "
                f"ended after {recovery.ended:5.1f} s, attempts {recovery.attempts}"
            )

    def _fail(self, part: str, point: str, why: str) -> None:
        self.failed.append({"part": part, "point": point, "why": why})
        _say(f"{part:17} {point:16} FAILED\n{why}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run matrix and campaign, print, store, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--stacks", type=int, default=3, help="services side by side (3: a minute's waiting each)")
    parser.add_argument("--only", nargs="*", metavar="PART:POINT", help="these cells alone; nothing is stored")
    parser.add_argument("--seed", type=int, default=1, help="of the campaign (1)")
    parser.add_argument("--campaign-seconds", type=float, default=420, help="how long its nemesis rages (420)")
    options = parser.parse_args(arguments)
    cells = [tuple(text.split(":")) for text in options.only] if options.only else list(EVERY_CELL)
    if unknown := [cell for cell in cells if cell not in EVERY_CELL]:
        parts, points = ", ".join((*PARTS, *EMBEDDED_PARTS)), ", ".join(EVERY_POINT)
        parser.error(f"{unknown} are no cells; parts are {parts}, points {points}")
    began = time.monotonic()
    of_stacks, embedded = (
        [(part, point) for part, point in cells if part.startswith(EMBEDDED) == own] for own in (False, True)
    )
    soak = Soak(of_stacks, embedded)
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        raging = None if options.only else beside.submit(_campaign, options.seed, options.campaign_seconds)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: soak.given_up.set())
        soak.run(options.stacks)
        campaign = None if raging is None else raging.result()
    claims = _claims(soak, len(cells)) + ([] if campaign is None else _claims_of(campaign))
    _print_table(soak.recoveries)
    if campaign is not None:
        _say(campaign.summary())
    figures = {
        "settings": "defaults: heartbeat 10 s, lease 45 s, reaper 10 s, poll 3 s",
        "stacks": options.stacks,
        "seconds": round(time.monotonic() - began, 1),
        "servers": {"postgresql": _version(servers.find_postgres()), "redis": _version(servers.find_redis())},
        "cells": [asdict(each) for each in sorted(soak.recoveries, key=lambda each: (each.part, each.point))],
        "failed": soak.failed,
        "by_part": {
            part: _summary([e for e in soak.recoveries if e.part == part]) for part in (*PARTS, *EMBEDDED_PARTS)
        },
        "campaign": None if campaign is None else campaign.as_json() | {"logs": None},
        "by_point": {point: _summary([e for e in soak.recoveries if e.point == point]) for point in EVERY_POINT},
    }
    if not options.only:
        write("soak", claims, figures)
    return 0 if all(each["holds"] for each in claims) else 1


def _claims(soak: Soak, cells: int) -> list[dict[str, Any]]:
    text = "seconds from a kill -9 (or an embedded service's next start) to the job's running again, at most"
    usual = text.replace("at most", "in the median")
    taken = [each.running_again for each in soak.recoveries]
    return [
        claim(f"cells of {cells} in which a job did not end with its rows stored once", len(soak.failed), 0),
        claim(text, max(taken), MOST_SECONDS) if taken else not_measured(text, MOST_SECONDS, "no cell ended"),
        claim(usual, median(taken), MEDIAN_SECONDS) if taken else not_measured(usual, MEDIAN_SECONDS, "no cell ended"),
    ]


def _campaign(seed: int, seconds: float) -> Report:
    """A campaign with the default leases, beside the cells; its jobs last more than ten of its gaps."""
    with tempfile.TemporaryDirectory(prefix="kronoscope-soak-campaign-") as folder:
        return run_campaign(
            seed,
            seconds,
            Path(folder),
            settings={},
            lease_seconds=45,
            gap_seconds=GAP_SECONDS,
            pace=Pace(batches=60, batch_seconds=1.0, row_seconds=1.0),
            drain_seconds=400,
            variants=VARIANTS,
        )


def _claims_of(campaign: Report) -> list[dict[str, Any]]:
    enough = claim(
        "campaigns that did not count (too few re-claims, refusals or lost replies)", float(not campaign.counts), 0
    )
    return [
        claim("violations that the campaign's checker found", len(campaign.violations), 0),
        claim("jobs of the campaign that were left when the drain's time was up", float(not campaign.drained), 0),
        enough,
    ]


def _longest_first(cells: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those that wait for a lease to run out come first, so that no stack ends long after the others."""
    return sorted(cells, key=lambda cell: cell[0] != "worker")


def _summary(recoveries: Sequence[Recovery]) -> dict[str, float] | None:
    if not recoveries:
        return None
    again = [each.running_again for each in recoveries]
    ended = [each.ended for each in recoveries]
    return {
        "cells": len(again),
        "median_running_again": round(statistics.median(again), 2),
        "max_running_again": round(max(again), 2),
        "median_ended": round(statistics.median(ended), 2),
        "max_ended": round(max(ended), 2),
    }


def _print_table(recoveries: Sequence[Recovery]) -> None:
    _say(f"{'':16} {'cells':>5} {'median':>8} {'max':>8}   seconds from the kill to running again")
    for name, of in [("part", (*PARTS, *EMBEDDED_PARTS)), ("point", EVERY_POINT)]:
        for value in of:
            found = _summary([each for each in recoveries if getattr(each, name) == value])
            if found is not None:
                median, most = found["median_running_again"], found["max_running_again"]
                _say(f"{value:16} {found['cells']:5} {median:8.1f} {most:8.1f}")


def _version(binary: Path | None) -> str:
    if binary is None:
        return "unknown"
    return subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
