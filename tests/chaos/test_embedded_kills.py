"""kill -9 of each process of an embedded service: the others leave, and the next start goes on with the job."""

from collections.abc import Iterator

import pytest

from tests.chaos.embedded_cells import run_embedded_cell
from tests.chaos.stack.embedded import OF_A_JOB, EmbeddedService, embedded_service

pytestmark = pytest.mark.real_programs


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with embedded_service(tmp_path_factory.mktemp("embedded")) as service:
        yield service


@pytest.mark.parametrize(
    "process",
    [
        "first",
        pytest.param("worker", marks=pytest.mark.part(of=12, by=())),
        # ended by the first process as a worker's end is noticed; of a job's processes the kill matrix has the child
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("api", "webhooks", *OF_A_JOB)),
    ],
)
def test_the_others_leave_and_the_next_start_goes_on_with_the_job(service: EmbeddedService, process: str) -> None:
    run_embedded_cell(service, process, "mid_layer")
