"""One seeded campaign with short leases: nothing is lost, doubled, stale or wrong, and enough was done to say so."""

import os
import sys
from pathlib import Path

import pytest

from tests.chaos.campaign import run_campaign
from tests.chaos.fault_kinds import BROUGHT_ABOUT_BY
from tests.chaos.stack.evil_tenant import can_be_held

SEED = "KRONOSCOPE_CHAOS_SEED"
DEFAULT_SEED = 20_261


@pytest.mark.nightly(covered_by=tuple(sorted({test for tests in BROUGHT_ABOUT_BY.values() for test in tests})))
def test_a_campaign_breaks_no_promise(tmp_path: Path) -> None:
    seed = int(os.environ.get(SEED) or DEFAULT_SEED)
    sys.stdout.write(f"{SEED}={seed}; logs in {tmp_path}\n")
    report = run_campaign(seed, 15, tmp_path, evil=can_be_held())
    sys.stdout.write(f"{report.summary()}\n")
    told = "\n".join([report.summary(), *report.violations, "", *report.struck, "", *report.history, f"in {tmp_path}"])
    assert not report.violations, told
    assert report.drained, told
    assert report.counts, f"it did not count:\n{told}"
    assert report.verified, told
    assert report.jobs.get("succeeded", 0) >= 2, told
    # a second tenant's jobs attacked these all the while, where their workers can be given the rights of Compose
    assert not can_be_held() or sum(report.evil.values()) >= 2, told
