"""Divided jobs of the ledger."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from catalog.frames import Divided, Planned
from catalog.record import plain
from catalog.requests.pieces import Piece
from jobs.queue import attempt_writes
from jobs.queue.division import divide
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.pieces import read_pieces

BATCH = 16


def frame(count: int, round_name: Any = "collect") -> Divided:
    pieces = [
        Piece(
            round=round_name, index=each, count=count, begin=each * BATCH, end=(each + 1) * BATCH, total=count * BATCH
        )
        for each in range(count)
    ]
    return Divided(round=round_name, pieces=tuple(plain(piece) for piece in pieces))


@pytest.fixture
def divided(ledger: Engine, held: Callable[..., Claim]) -> Callable[..., tuple[Claim, list[str]]]:
    """``divided(6)``: the claim that was given up for six pieces, and their ids."""

    def make(count: int = 3, **changes: Any) -> tuple[Claim, list[str]]:
        mine = held(**{"shards": count, "name": "digits"} | changes)
        attempt_writes.write_plan(ledger, mine, Planned(plan={"threads": 3, "device_peak_bytes": 9, "why": "w"}))
        assert divide(ledger, mine, frame(count)) == "waiting"
        return mine, [each.id for each in read_pieces(ledger, LOCAL_TENANT, mine.job_id)]

    return make
