"""Suite times: wall and processor seconds of each file and of each long test, and what was tried again.

`--times FILE` writes them as JSON; `--bound-minutes M` ends a run that took longer with a failure, as do more than two
second attempts. Processor seconds of children are those of processes that have ended: what a server of the whole run
takes counts in its total alone.
"""

import json
import resource
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

LONG_SECONDS = 1.0
MOST_RETRIES = 2
LISTED = 15


@dataclass
class Spent:
    """Seconds of a test, of a file, or of the run."""

    wall: float = 0.0
    cpu: float = 0.0
    children: float = 0.0
    tests: int = 0

    def add(self, other: "Spent") -> None:
        """Add what another one took."""
        self.wall += other.wall
        self.cpu += other.cpu
        self.children += other.children
        self.tests += other.tests

    def rounded(self) -> dict[str, float]:
        """Return the seconds with two places."""
        return {name: round(value, 2) for name, value in asdict(self).items()}


def _clocks() -> tuple[float, float, float]:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), time.process_time(), children.ru_utime + children.ru_stime


class TestClock:
    """In the process that runs the tests: what each attempt took, from its set-up to its teardown's end."""

    __test__ = False

    def __init__(self) -> None:
        self._began = _clocks()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        """Begin to count."""
        self._began = _clocks()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, Any]:
        """Give the seconds to the last report of an attempt."""
        report = yield
        if call.when == "teardown":
            taken = [after - before for before, after in zip(self._began, _clocks(), strict=True)]
            report.user_properties = [*report.user_properties, ("spent", taken)]
        return report


@dataclass(eq=False)  # pytest looks plugins up by their hash
class SuiteTimes:
    """In the process that reports: the sums, and the judgement of the run."""

    path: Path | None
    bound_seconds: float | None
    total: Spent = field(default_factory=Spent)
    files: dict[str, Spent] = field(default_factory=dict)
    long: dict[str, Spent] = field(default_factory=dict)
    retries: list[dict[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = _clocks()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count an attempt."""
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]
            lines = str(report.longrepr).strip().splitlines()
            self.retries.append({"test": report.nodeid, "why": lines[-1][:300] if lines else ""})
        taken = dict(report.user_properties).get("spent") if report.when == "teardown" else None
        if isinstance(taken, list):
            spent = Spent(*taken, tests=1)
            self.files.setdefault(report.nodeid.partition("::")[0], Spent()).add(spent)
            if spent.wall > LONG_SECONDS:
                self.long.setdefault(report.nodeid, Spent()).add(spent)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Write the file, and judge: after xdist has waited for its processes, and before the summary is printed."""
        yield
        self.total = Spent(*(after - before for before, after in zip(self._began, _clocks(), strict=True)))
        self.total.tests = sum(each.tests for each in self.files.values())
        if len(self.retries) > MOST_RETRIES:
            self.faults.append(f"{len(self.retries)} second attempts, where {MOST_RETRIES} may be")
        if self.bound_seconds is not None and self.total.wall > self.bound_seconds:
            self.faults.append(f"{self.total.wall / 60:.1f} minutes, where {self.bound_seconds / 60:g} are the bound")
        if self.faults and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.path is not None:
            self.path.write_text(json.dumps(self.content(), indent=1) + "\n")

    def content(self) -> dict[str, Any]:
        """Return what the file holds."""

        def listed(spent: dict[str, Spent]) -> dict[str, dict[str, float]]:
            return {name: spent[name].rounded() for name in sorted(spent, key=lambda name: -spent[name].wall)}

        from benchmarks import results_file  # noqa: PLC0415 - it imports torch

        return results_file.header("suite") | {
            "total": self.total.rounded(),
            "retries": self.retries,
            "faults": self.faults,
            "files": listed(self.files),
            "tests": listed(self.long),
        }

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the longest files and the run's figures."""
        write = terminalreporter.write_line
        terminalreporter.section("suite times")
        write(f"{'wall s':>8} {'cpu s':>8} {'children':>8} {'tests':>6}  file")
        for name, spent in sorted(self.files.items(), key=lambda pair: -pair[1].wall)[:LISTED]:
            write(f"{spent.wall:8.1f} {spent.cpu:8.1f} {spent.children:8.1f} {spent.tests:6}  {name}")
        bound = "" if self.bound_seconds is None else f" (bound {self.bound_seconds / 60:g})"
        write(f"{self.total.tests} tests in {self.total.wall / 60:.1f} minutes{bound}, {len(self.retries)} tried again")
        for each in self.retries:
            write(f"tried again: {each['test']}: {each['why']}")
        for fault in self.faults:
            write(f"FAULT: {fault}", red=True)


def add_options(parser: pytest.Parser) -> None:
    """Register the options."""
    group = parser.getgroup("suite times")
    group.addoption("--times", type=Path, metavar="FILE", help="write wall and processor seconds there, as JSON")
    group.addoption("--bound-minutes", type=float, metavar="M", help="fail if the run takes longer")


def register(config: pytest.Config) -> None:
    """Count in each process of the run, and report in one."""
    config.pluginmanager.register(TestClock(), "test clock")
    if not hasattr(config, "workerinput"):
        path, minutes = config.getoption("--times"), config.getoption("--bound-minutes")
        bound = None if minutes is None else minutes * 60
        config.pluginmanager.register(SuiteTimes(path, bound), "suite times")
