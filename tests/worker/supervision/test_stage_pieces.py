"""A divided job through its supervisors: pieces get what earlier rounds have left, and the job what all have."""

import json
import secrets
from functools import partial
from typing import Any

import pytest

from jobs.objects.artifacts import ArtifactFolder
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT
from jobs.repository.pieces import read_pieces
from jobs.repository.results import layer_rows, list_artifacts
from tests.queue_order import next_claimable
from worker.supervision.staging import files_of_others
from worker.supervision.supervisor import Supervisor

FIRST, SECOND = 3, 2


def steps(second: str = "correct") -> list[Any]:
    return [
        *(["started"], ["plan", {"device_peak_bytes": 10}]),
        ["if_piece", ["collect"], ["finish", 2]],
        ["divide", FIRST],
        ["artifact", "merged.json", "{}"],
        ["divide", SECOND, second],
        *(["merge"], ["summary"], ["finish"]),
    ]


def squares(pieces: int) -> int:
    """Of all examples of a round: two in each piece."""
    return sum(each**2 for each in range(2 * pieces))


@pytest.fixture
def attempt(ledger: Any, settings: Any, scripted: Any) -> Any:
    """Claim the next job of the queue, run one attempt, and return the job's id."""

    def run(*own: Any) -> str:
        chosen = settings()
        held = claim(ledger, next_claimable(ledger)[0], "test", secrets.token_hex(8), chosen.ledger.lease_seconds)
        assert held is not None
        Supervisor(ledger, held, chosen, scripted(*own)).run()
        return held.job_id

    return run


@pytest.mark.parametrize("second", ["correct", "score"])
def test_a_job_goes_on_after_each_round_with_the_files_of_its_pieces(
    ledger: Any, submitted: Any, attempt: Any, job: Any, events: Any, settings: Any, second: str
) -> None:
    attempt = partial(attempt, *steps(second))
    job_id = submitted(shards=FIRST, collection={"ekfac": second == "correct"})
    files = ArtifactFolder(settings().ledger.artifact_root)

    def told(of_job: str, name: str) -> Any:
        (file,) = [each for each in list_artifacts(ledger, LOCAL_TENANT, of_job) if each.name == name]
        with files.open(file) as opened:
            return json.load(opened)

    assert attempt() == job_id
    assert job(job_id).state == "waiting"
    assert len({attempt() for _ in range(FIRST)}) == FIRST
    assert job(job_id).state == "queued"
    assert attempt() == job_id
    progress = job(job_id).progress
    begins = {"correct": ("collection", "examples", 40.0), "score": ("score", "queries", 70.0)}[second]
    assert job(job_id).state == "waiting"
    assert (progress["stage"], progress["unit"], progress["percent"]) == begins
    later = [attempt() for _ in range(SECOND)]
    # a piece of the second round finds the first round, and what the job itself had written by then
    for each in later:
        assert told(each, "factors/squares.json")["before"] == {"collect": squares(FIRST), "own": 1}
    assert attempt() == job_id
    done = job(job_id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 3, 0)
    whole = {"collect": squares(FIRST), second: squares(SECOND), "own": 1}
    assert told(job_id, "factors/sum.json") == whole
    (row,) = layer_rows(ledger, LOCAL_TENANT, job_id).items
    assert row.outcome["metrics"]["effective_rank"] == sum(whole.values())
    pieces = read_pieces(ledger, LOCAL_TENANT, job_id)
    assert [(each.examples, each.model_sha256) for each in pieces] == [(2, "5" * 64)] * (FIRST + SECOND)
    # each piece computes with what the job's first attempt has planned
    assert all(job(each.id).plan == done.plan for each in pieces)
    assert [list_artifacts(ledger, LOCAL_TENANT, each.id) for each in pieces] == [()] * len(pieces)
    told_of = [(event.data["round"], event.data["state"]) for event in events(job_id, "piece")]
    assert (
        told_of
        == [("collect", "running"), ("collect", "succeeded")] * FIRST
        + [
            (second, "running"),
            (second, "succeeded"),
        ]
        * SECOND
    )
    # nothing that was laid out stays
    assert [each for each in files.root.rglob("*") if "pieces" in each.parts or "divided" in each.parts] == []


def test_a_piece_that_cannot_be_computed_fails_its_job(submitted: Any, attempt: Any, job: Any) -> None:
    job_id = submitted(shards=2)
    bad = [["started"], ["if_piece", ["fail", "usage", "bad_row", "row 7 is empty"]], ["divide", 2]]
    for _ in range(2):
        attempt(*bad)
    done = job(job_id)
    assert (done.state, done.failure["code"]) == ("failed", "bad_row")
    assert "row 7 is empty" in done.failure["message"]
    assert "piece 1 of 2" in done.failure["message"]


def test_a_piece_of_layers_is_brought_no_other_layers_factors() -> None:
    def entry(ordinal: int, name: str, shares: int | None = None, tied: Any = None) -> dict[str, Any]:
        return {"ordinal": ordinal, "name": name, "shared_A_with": shares, "sums": {"tied": tied}}

    layers = [
        entry(0, "q"),
        entry(1, "k", 0),
        entry(2, "mlp"),
        entry(3, "head", tied={"lookups": 3.0}),
        entry(4, "out"),
    ]
    index = {"collection": {"batch_variance": False}, "layers": layers}
    # k reads the A that q holds, and head and table of one weight are joined whoever opens the set
    assert files_of_others(index, frozenset({"k"})) == {"factors/2.safetensors", "factors/4.safetensors"}
    assert files_of_others({**index, "collection": {"batch_variance": True}}, frozenset({"k"})) == frozenset()
