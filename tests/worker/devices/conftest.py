"""Worker processes on machines whose GPUs are made up."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

MIB = 2**20


@pytest.fixture
def started(ledger_url: str, tmp_path: Any) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``started("node-1", 2**30)``: a worker process whose machine has one GPU of that size."""
    running = []

    def start(node: str, *sizes: int, **more: str) -> subprocess.Popen[bytes]:
        given = {
            "KRONOSCOPE_DATABASE_URL": ledger_url,
            "KRONOSCOPE_ARTIFACTS": str(tmp_path / "artifacts"),
            "KRONOSCOPE_MODEL_STORE": str(tmp_path / "store"),
            "KRONOSCOPE_FAKE_GPUS": ",".join(f"{size // MIB}MiB" for size in sizes),
            "KRONOSCOPE_NODE": node,
            "KRONOSCOPE_SLOTS": str(len(sizes)),
            "KRONOSCOPE_POLL_SECONDS": "0.2",
            "KRONOSCOPE_HEARTBEAT_SECONDS": "1",
            # a machine that is taken away for some seconds must not look like a worker that is gone
            "KRONOSCOPE_LEASE_SECONDS": "120",
            "KRONOSCOPE_REAPER_SECONDS": "0.5",
            "KRONOSCOPE_THREADS": "1",
        } | more
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker.embedded"], env={**os.environ, **given}, stderr=subprocess.DEVNULL
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        try:
            process.wait(240)
        finally:
            process.kill()
            process.wait()
