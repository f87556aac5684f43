"""One cluster for all tests of this folder."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import servers
from tests.slurm.cluster import SlurmCluster, running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    folder = Path(tempfile.mkdtemp(prefix="kronoscope-slurm-", dir=servers.PARENT))
    folder.chmod(0o755)  # munge's own user enters it
    try:
        with running_cluster(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
