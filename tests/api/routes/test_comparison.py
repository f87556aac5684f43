"""Jobs beside each other: the numbers that `/layers` and `/results` give, of one's own jobs alone."""

import math
from typing import Any

import httpx
import pytest

from catalog.frames import layer_frame
from jobs.queue import attempt_endings, attempt_writes
from jobs.tenancy.api_keys import verify_key
from tests.api import seeding
from tests.api.conftest import Keyed
from tests.api.expect import problem
from tests.api.server import KEY_SECRET

COMPARE = "/v1/jobs:compare"


def measured(keyed: Keyed, key: str, seed: int, scale: float, names: tuple[str, ...]) -> str:
    """A finished job whose layers have these names, each with spectra of this scale."""
    holder = verify_key(keyed.engine, KEY_SECRET, key)
    assert holder is not None
    document = seeding.DOCUMENT | {"name": f"seed {seed}", "collection": {"seed": seed}}
    claim = seeding.claimed(keyed.engine, holder.tenant_id, document)
    for kind in claim.kinds:
        for place, name in enumerate(names):
            spectra = [scale * (place + 1), 3.0 * scale], [0.5, 1.0 + place]
            row = seeding.row(kind, place, name, "Linear", 10, *spectra)
            attempt_writes.write_layer(keyed.engine, claim, layer_frame(row))
        attempt_writes.write_layer(keyed.engine, claim, layer_frame(seeding.declared(kind, len(names))))
    seeding.summarise(keyed.engine, claim, covered_share=0.25 * scale)
    attempt_endings.finish(keyed.engine, claim)
    return claim.job_id


@pytest.fixture(scope="module")
def jobs(keyed: Keyed) -> list[str]:
    names = ("a", "b", "c"), ("b", "a"), ("a", "b", "d")
    return [measured(keyed, keyed.key, place, 1.0 + place, each) for place, each in enumerate(names)]


def rows(client: httpx.Client, job_id: str) -> dict[tuple[str, str], dict[str, Any]]:
    items = client.get(f"/v1/jobs/{job_id}/layers", params={"limit": 100}).json()["items"]
    return {(each["kind"], each["layer"]): each for each in items}


def at(record: Any, path: str) -> Any:
    """The value at a path of a record, walked without the product's help; None where it ends before."""
    for part in path.split("."):
        if isinstance(record, list):
            record = record[int(part)] if int(part) < len(record) else None
        else:
            record = record.get(part) if isinstance(record, dict) else None
    return record


def is_right(name: str, metric: dict[str, Any], stored: list[Any]) -> None:
    """A metric has the stored values, and what follows from them and the first."""
    assert metric["values"] == stored, name
    for value, difference, ratio in zip(stored, metric["differences"], metric["ratios"], strict=True):
        known = value is not None and stored[0] is not None
        assert difference == (value - stored[0] if known else None), name
        assert ratio == (value / stored[0] if known and stored[0] != 0 else None), name


def test_every_number_is_the_stored_one(ours: httpx.Client, jobs: list[str]) -> None:
    compared = ours.get(COMPARE, params={"ids": ",".join(jobs)}).json()
    stored = [rows(ours, each) for each in jobs]
    assert {(each["kind"], each["layer"]) for each in compared["layers"]} == set().union(*stored)
    for layer in compared["layers"]:
        of_jobs = [each.get((layer["kind"], layer["layer"])) for each in stored]
        assert layer["ordinals"] == [None if each is None else each["ordinal"] for each in of_jobs]
        records = [None if each is None else each["metrics"] for each in of_jobs]
        for name, metric in layer["metrics"].items():
            is_right(name, metric, [at(each, name) for each in records])
        for name, value in (next((each for each in records if each is not None), None) or {}).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                assert name in layer["metrics"], name
    capacity = next(each for each in compared["layers"] if each["layer"] == "a" and each["kind"] == "capacity")
    assert {"trace", "quantiles.1.value", "decay.exponent"} <= set(capacity["metrics"])
    assert not any("approximate" in name for name in capacity["metrics"])  # a truth, and no number
    # A has the eigenvalues s and 3 s, twice s where `a` is the second layer; G 0.5 and 1, or 0.5 and 2
    assert capacity["metrics"]["trace"]["values"] == pytest.approx([4 * 1.5, 10 * 2.5, 12 * 1.5])
    assert capacity["metrics"]["trace"]["ratios"] == pytest.approx([1, 25 / 6, 3])


def test_the_summaries_and_the_documents_are_compared(ours: httpx.Client, jobs: list[str]) -> None:
    compared = ours.get(COMPARE, params={"ids": ",".join(jobs)}).json()
    summaries = [ours.get(f"/v1/jobs/{each}/results").json()["summary"] for each in jobs]
    assert set(compared["model"]) == {"factors", "capacity"}
    for kind, metrics in compared["model"].items():
        for name, metric in metrics.items():
            is_right(name, metric, [at(each[kind], name) for each in summaries])
    assert compared["model"]["capacity"]["coverage.covered_share"]["values"] == [0.25, 0.5, 0.75]
    assert compared["documents"] == {"collection.seed": ["0", "1", "2"]}
    assert [each["name"] for each in compared["jobs"]] == ["seed 0", "seed 1", "seed 2"]


def test_labels_are_compared_as_they_are_now(keyed: Keyed, ours: httpx.Client) -> None:
    two = [measured(keyed, keyed.key, seed, 1.0, ("a",)) for seed in (7, 7)]
    ours.patch(f"/v1/jobs/{two[1]}", json={"labels": {"of": "now"}}).raise_for_status()
    compared = ours.get(COMPARE, params={"ids": ",".join(two)}).json()["documents"]
    assert compared["labels.of"] == [None, '"now"']


def test_layers_that_not_all_have_are_named(ours: httpx.Client, jobs: list[str]) -> None:
    compared = ours.get(COMPARE, params={"ids": f"{jobs[0]},{jobs[2]}"}).json()
    assert [each["only"] for each in compared["jobs"]] == [["c"], ["d"]]
    alone = {each["layer"]: each for each in compared["layers"] if each["kind"] == "capacity"}
    assert (alone["c"]["ordinals"], alone["d"]["ordinals"]) == ([2, None], [None, 2])
    trace = alone["c"]["metrics"]["trace"]
    assert (trace["values"][1], trace["differences"][1], trace["ratios"][1]) == (None, None, None)


def test_one_analysis_and_one_number_can_be_chosen(ours: httpx.Client, jobs: list[str]) -> None:
    chosen = {"ids": ",".join(jobs[:2]), "kind": "capacity", "metric": "trace"}
    compared = ours.get(COMPARE, params=chosen).json()
    assert {each["kind"] for each in compared["layers"]} == {"capacity"} == set(compared["model"])
    assert {name for each in compared["layers"] for name in each["metrics"]} == {"trace"}


def test_a_difference_that_no_float_holds_is_null(keyed: Keyed, ours: httpx.Client) -> None:
    ids = ",".join(measured(keyed, keyed.key, place, scale, ("a",)) for place, scale in enumerate((1e-158, 1e152)))
    (trace,) = [
        each["metrics"]["trace"]
        for each in ours.get(COMPARE, params={"ids": ids, "kind": "capacity"}).json()["layers"]
        if each["layer"] == "a"
    ]
    assert math.isfinite(trace["differences"][1])
    assert trace["ratios"] == [1, None]


@pytest.mark.parametrize("ids", ["", "one", "one,one", ",".join(f"job{each}" for each in range(9))])
def test_too_few_and_too_many_are_refused(ours: httpx.Client, ids: str) -> None:
    said = problem(ours.get(COMPARE, params={"ids": ids}), 422)
    assert "must be 2 to 8 ids, each once" in str(said["detail"])


def test_what_an_address_does_not_take_is_refused(ours: httpx.Client, jobs: list[str]) -> None:
    ids = ",".join(jobs[:2])
    refused: list[tuple[dict[str, str], str]] = [
        ({}, "ids"), ({"ids": ids, "kind": "capcity"}, "kind"), ({"ids": ids, "sort": "trace"}, "sort"),
    ]  # fmt: skip
    for params, parameter in refused:
        problem(answer := ours.get(COMPARE, params=params), 422)
        assert [each["parameter"] for each in answer.json()["errors"]] == [parameter]


def test_a_job_of_others_is_answered_as_a_random_one(
    keyed: Keyed, ours: httpx.Client, theirs: httpx.Client, jobs: list[str]
) -> None:
    own = measured(keyed, keyed.other_key, 0, 1.0, ("a",))
    unknown = own[:-4] + ("0000" if own[-4:] != "0000" else "1111")
    for asked in ((own, jobs[0]), (jobs[0], own)):
        random = tuple(unknown if each == jobs[0] else each for each in asked)
        answers = [theirs.get(COMPARE, params={"ids": ",".join(each)}) for each in (asked, random)]
        said = [
            {name: value for name, value in problem(each, 404).items() if name not in ("instance", "request_id")}
            for each in answers
        ]
        assert said[0] == said[1]
    assert ours.get(COMPARE, params={"ids": ",".join(jobs[:2])}).status_code == 200
