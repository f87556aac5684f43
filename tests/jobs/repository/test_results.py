"""Layer rows in pages, and whose they are."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select

from jobs.queue.attempt_writes import write_layer
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.results import LayerQuery, layer_rows
from jobs.schema.database import reading
from jobs.schema.tables import job_events, jobs, layer_results, metadata

Held = Callable[..., Claim]


@pytest.fixture
def sorted_job(ledger: Engine, held: Held, layer_frame: Any) -> Claim:
    mine = held(kind=["factors", "capacity"])
    for ordinal, trace in enumerate([3.0, 1e300, None, 2.0, 2.0, -1.0, 0.1]):
        write_layer(ledger, mine, layer_frame(ordinal, trace=trace, form="kronecker"))
    write_layer(ledger, mine, layer_frame(7))  # a declared layer has no metrics at all
    write_layer(ledger, mine, layer_frame(0, "factors", trace_A=1.0))
    return mine


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("trace", [5, 6, 3, 4, 0, 1, 2, 7]),
        ("-trace", [1, 0, 3, 4, 6, 5, 2, 7]),
    ],
)
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_layers_are_paged_in_every_order(
    ledger: Engine, sorted_job: Claim, sort: str | None, order: list[int], limit: int
) -> None:
    seen: list[int] = []
    after = None
    while True:
        page = layer_rows(
            ledger, LOCAL_TENANT, sorted_job.job_id, LayerQuery(kind="capacity", after=after, limit=limit, sort=sort)
        )
        assert 0 < len(page.items) <= limit
        seen += [row.ordinal for row in page.items]
        after = page.next
        if after is None:
            break
    assert seen == order


def test_layers_are_found_by_name_over_all_kinds(ledger: Engine, sorted_job: Claim) -> None:
    found = layer_rows(ledger, LOCAL_TENANT, sorted_job.job_id, LayerQuery(layer="features.0")).items
    assert [(row.kind, row.ordinal) for row in found] == [("capacity", 0), ("factors", 0)]


def test_every_row_carries_its_tenant(ledger: Engine, sorted_job: Claim) -> None:
    with reading(ledger) as connection:
        for table in (jobs, job_events, layer_results):
            assert set(connection.execute(select(table.c.tenant_id)).scalars()) == {LOCAL_TENANT}
    # machines are the operator's, as workers are, and a key of proof is a role's of the database
    of_machines = {"workers", "devices", "worker_devices", "machines", "machine_classes"}
    of_nobody = {"tenants", "counters", "proof_keys"} | of_machines
    for table in metadata.sorted_tables:
        assert table.name in of_nobody or not table.c.tenant_id.nullable
