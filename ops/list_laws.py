"""List the laws and fault kinds that the tests hold, with the cases of each that a landing and a nightly run have.

    python -m ops.list_laws [--part COMMIT] [--json FILE] [--all]

A law is a test function; tests/machine/laws.py says which of them a landing may leave out. Nothing is run, only
collected (half a minute). The command fails where a landing has nothing of a law or of a fault kind.
"""

import argparse
import contextlib
import io
import json
import sys
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.fault_kinds import BROUGHT_ABOUT_BY
from tests.machine.laws import Law, find_gaps, law_of, list_laws

CAMPAIGN = "tests/chaos/test_campaign.py::test_a_campaign_breaks_no_promise"
CHAOS = "tests/chaos"


@dataclass
class Recorder:
    """A plugin that keeps what a run collects and what it leaves of that."""

    collected: list[pytest.Item] = field(default_factory=list)
    chosen: list[pytest.Item] = field(default_factory=list)
    failure: str = ""
    """Why the run failed, of which gaps are one reason."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        """Keep the cases, before and after parts and marks are taken out."""
        self.collected = list(items)
        yield
        self.chosen = list(items)


def collect(folders: Sequence[str], part: str | None) -> Recorder:
    """Collect tests as a landing does."""
    recorder, output = Recorder(), io.StringIO()
    options = ["--collect-only", "-q", "-m", "not gpu and not docker and not slurm"]
    with contextlib.redirect_stdout(output):
        code = pytest.main([*options, *([f"--part={part}"] if part else []), *folders], plugins=[recorder])
    if code != pytest.ExitCode.OK:
        recorder.failure = f"{output.getvalue()[-2000:]}\nthe tests cannot be collected: {code!r}"
    return recorder


def count_fault_kinds(laws: Sequence[Law], chosen: Sequence[str], collected: Sequence[str]) -> dict[str, Any]:
    """Return of each fault kind how many cases bring it about: tests of its own, and the campaign."""
    campaign = next((law for law in laws if law.name == CAMPAIGN), Law(CAMPAIGN, 0, 0))

    def count(tests: Sequence[str], cases: Sequence[str]) -> int:
        return sum(case in tests or law_of(case) in tests for case in cases)

    return {
        kind: {
            "landing": count(tests, chosen) + campaign.landing,
            "nightly": count(tests, collected) + campaign.nightly,
            "tests": list(tests),
        }
        for kind, tests in BROUGHT_ABOUT_BY.items()
    }


def as_table(laws: Sequence[Law], kinds: dict[str, Any], *, every_law: bool) -> str:
    """Return the rooms with their laws and cases, and the fault kinds."""
    rooms: dict[str, list[Law]] = defaultdict(list)
    for law in laws:
        rooms[law.room].append(law)
    rooms["all"] = list(laws)
    lines = [f"{'laws':>6} {'in landing':>10} {'covered':>8} {'cases':>7} {'in landing':>10}  room"]
    for room, own in sorted(rooms.items()):
        run = sum(law.landing > 0 for law in own)
        cases, landing = sum(law.nightly for law in own), sum(law.landing for law in own)
        lines.append(f"{len(own):6} {run:10} {len(own) - run:8} {cases:7} {landing:10}  {room}")
        if every_law and room != "all":
            lines += [f"{'':36}{law.nightly:7} {law.landing:10}    {law.name.partition('::')[2]}" for law in own]
    lines += ["", f"{'cases':>6} {'in landing':>10}  fault kind"]
    lines += [f"{each['nightly']:6} {each['landing']:10}  {kind}" for kind, each in kinds.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", default=["tests"], help="what is collected (default: tests)")
    parser.add_argument("--part", help="the commit that parts are chosen by (default: HEAD)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write laws, chaos cases and fault kinds there")
    parser.add_argument("--all", action="store_true", help="print each law, not only the rooms")
    given = parser.parse_args(arguments)
    recorder = collect(given.folders, given.part)
    laws = list_laws(recorder.collected, recorder.chosen)
    chosen = [item.nodeid for item in recorder.chosen]
    collected = [item.nodeid for item in recorder.collected]
    kinds = count_fault_kinds(laws, chosen, collected)
    sys.stdout.write(as_table(laws, kinds, every_law=given.all) + "\n")
    if given.json is not None:
        content = {
            "laws": [asdict(law) for law in laws],
            "chaos": {
                "landing": [case for case in chosen if case.startswith(CHAOS)],
                "nightly": [case for case in collected if case.startswith(CHAOS)],
            },
            "fault_kinds": kinds,
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    gaps = find_gaps(laws, set(chosen)) if given.folders == ["tests"] else []
    if recorder.failure and not gaps:
        raise SystemExit(recorder.failure)
    sys.stdout.write("".join(f"GAP: {gap}\n" for gap in gaps))
    return 1 if gaps else 0


if __name__ == "__main__":
    sys.exit(main())
