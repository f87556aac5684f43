"""The commands on jobs of a service, as processes against a real one: names, short ids, pipes, ctrl-C, files."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import LogLine, layer_frame
from catalog.responses.coverage import assess_coverage
from jobs.queue import attempt_endings, attempt_writes
from jobs.records import LOCAL_TENANT
from jobs.repository.store import request_cancel
from kronoscope.client import Client, ClientError
from kronoscope.display.methods import methods_text
from tests.api import seeding
from tests.api.conftest import Embedded, embedded
from tests.kronoscope.conftest import KRONOSCOPE, environment

__all__ = ["embedded"]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def finished(embedded: Embedded) -> str:
    return seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT)


@pytest.fixture
def run(tmp_path: Path, embedded: Embedded) -> Run:
    (tmp_path / "job.json").write_text(json.dumps(seeding.DOCUMENT))

    def command(*arguments: str, stdout: int = subprocess.PIPE, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*KRONOSCOPE, *arguments],
            cwd=tmp_path,
            env=environment(KRONOSCOPE_URL=embedded.server.url, **variables),
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    return command


def test_a_job_is_found_by_its_name(run: Run) -> None:
    done = run("submit", "job.json", "--name", "first of the thesis")
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    listed = run("jobs", "--name", "THESIS", "--since", "5m", "--state", "queued")
    assert "first of the thesis" in listed.stdout
    assert job_id in listed.stdout
    # the second is a word of the sort, too
    assert [run("jobs", "--name", name).stdout.count("\n") for name in ("another", "newest")] == [2, 2]
    wrong = run("jobs", "--state", "quued")
    assert wrong.returncode == 2
    assert "did you mean `queued`?" in wrong.stderr


def test_a_job_runs_again_with_changes(run: Run, tmp_path: Path, embedded: Embedded) -> None:
    first = run("submit", "job.json", "--name", "of the thesis", "--priority", "3", "--within", "4h").stdout.strip()
    again = run("rerun", first[-12:], "--set", "collection.batch_size=7", "--set", "labels.round=second")
    assert again.returncode == 0, again.stderr
    with Client(embedded.server.url) as client:
        one, two = client.job(first), client.job(again.stdout.strip())
        assert two.id != one.id
        assert (two.name, two.priority, two.deadline_at) == ("of the thesis", 3, None)
        changed = {**one.document["collection"], "batch_size": 7}
        assert two.document == {**one.document, "collection": changed, "labels": {**one.labels, "round": "second"}}
        same = client.rerun(first, {"labels.round": "third"}, idempotency_key="once")
        assert client.rerun(first, {"labels.round": "third"}, idempotency_key="once").id == same.id
        assert client.rerun(first).document_sha256 == one.document_sha256
        with pytest.raises(ClientError, match="`kind` is a value, not a block"):
            client.rerun(first, {"kind.of": 3})
        with pytest.raises(ClientError, match="did you mean `batch_size`"):
            client.rerun(first, {"collection.batch_sze": 3})
    wrong = run("rerun", first, "--set", "collection.batch_size")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    (tmp_path / "editor").write_text("#!/bin/sh\nsed -i 's/^name: .*/name: edited/' \"$1\"\n")
    (tmp_path / "editor").chmod(0o755)
    edited = run("rerun", first, "--edit", "--json", VISUAL=str(tmp_path / "editor"))
    assert json.loads(edited.stdout)["name"] == "edited", edited.stderr
    broken = run("rerun", first, "--edit", VISUAL=f"{shlex.quote('/bin/sh')} -c 'echo [ > $0'")
    assert (broken.returncode, broken.stdout) == (2, "")
    kept = Path(broken.stderr.split("error: ")[-1].split(": is not")[0].strip())
    assert kept.read_text() == "[\n"
    kept.unlink()


def test_a_short_id_is_taken_wherever_it_is_shown(run: Run, finished: str, embedded: Embedded) -> None:
    assert json.loads(run("results", finished[-8:], "--json").stdout)["job"]["id"] == finished
    assert run("watch", finished[-12:]).returncode == 0
    nobody = run("results", "00000000")
    assert nobody.returncode == 2
    assert "no job of yours has an id that ends with 00000000" in nobody.stderr
    with Client(embedded.server.url) as client:
        assert client.full_id(finished) == finished
        assert client.full_id("no id") == "no id"  # for the service to refuse
        client._connection.call = lambda *_, **__: {"items": [{"id": "a1234567"}, {"id": "b1234567"}]}  # type: ignore[method-assign]
        with pytest.raises(ClientError, match="several jobs have an id that ends with 01234567: a1234567, b1234567"):
            client.full_id("01234567")


def test_results_end_as_the_job_did(run: Run, embedded: Embedded) -> None:
    broken = seeding.failed_in_factory(embedded.engine, LOCAL_TENANT)
    watched, shown = run("watch", broken), run("results", broken)
    assert (shown.returncode, shown.stderr) == (watched.returncode, watched.stderr)
    assert shown.returncode == 2
    stopped = run("submit", "job.json").stdout.strip()
    run("cancel", stopped)
    ended = run("results", stopped)
    assert ended.returncode == 5
    assert f"no layer had been measured; `kronoscope rerun {stopped[-12:]}` starts it again" in ended.stderr
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    seeding.write_rows(embedded.engine, embedded.artifacts, claim, ("factors",))
    seeding.progress(embedded.engine, claim, stage="factors", done=3, total=7, unit="layers", layers_done=3)
    request_cancel(embedded.engine, LOCAL_TENANT, claim.job_id, by="kr_first")
    attempt_endings.hand_back(embedded.engine, claim)
    ended = run("results", claim.job_id)
    assert ended.returncode == 5
    said = r"cancelled, with the API key kr_first, at [\d-]+ [\d:]+ UTC; 8 rows are kept \(`kronoscope results"
    assert re.search(said, ended.stderr), ended.stderr  # as many as there are, whatever its progress has last counted


def test_what_a_cancelled_job_kept_is_counted_where_its_attempt_is_forgotten(run: Run, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    seeding.write_rows(embedded.engine, embedded.artifacts, claim, ("factors",))
    attempt_endings.hand_back(embedded.engine, claim)
    request_cancel(embedded.engine, LOCAL_TENANT, claim.job_id)
    watched, shown = run("watch", claim.job_id), run("results", claim.job_id)
    for each in (watched, shown):
        assert each.returncode == 5
        assert "; 8 rows are kept (`kronoscope results" in each.stderr


def test_names_are_whole_where_the_output_is_piped(run: Run, embedded: Embedded) -> None:
    name = "encoder." + ".".join(f"block_{place}" for place in range(8))
    document = seeding.DOCUMENT | {"kind": "factors"}
    claim = seeding.claimed(embedded.engine, LOCAL_TENANT, document)
    row = seeding.row("factors", 0, name, "Linear", 10, [1.0, 3.0], [2.0])
    attempt_writes.write_layer(embedded.engine, claim, layer_frame(row))
    seeding.summarise(embedded.engine, claim)
    attempt_endings.finish(embedded.engine, claim)
    shown = run("results", claim.job_id).stdout
    assert len(name) > 70
    assert name in shown
    assert "…" not in shown


def test_a_job_that_was_done_in_part_ends_with_a_code_of_its_own(run: Run, embedded: Embedded) -> None:
    seeds = (embedded.engine, embedded.artifacts, LOCAL_TENANT)
    job_id, measured = seeding.partly_refused(*seeds), seeding.partly_measured(*seeds)
    for command in ("watch", "results"):
        done = run(command, job_id)
        assert done.returncode == 6, done.stderr
        assert (
            "warning: `capacity` was refused, and the other analyses are done (/stabilisation): layer `features.0` has "
            "no curvature; take `stabilisation.damping_mode: absolute`" in done.stdout
        )
        assert run(command, measured).returncode == 6
    assert json.loads(run("results", job_id, "--json").stdout)["job"]["refused"][0]["kind"] == "capacity"
    assert "partial 1/2 refused" in run("jobs").stdout
    diagonal = seeding.of_diagonals(*seeds)
    assert "91.7% diagonal" in run("jobs").stdout
    shown = run("results", diagonal)
    assert shown.returncode == 0
    assert "coverage: 8.3% full block, 91.7% diagonal\n" in shown.stdout
    assert "  91.7% diagonal: positions (no product to factorise)\n" in shown.stdout
    assert "35.1% full block, 64.9% not covered" in run("results", measured).stdout
    for coverage, ids in (("partial", {job_id, measured}), ("diagonal", {diagonal})):
        listed = json.loads(run("jobs", "--coverage", coverage, "--json").stdout)
        assert {job["id"] for job in listed} & {job_id, measured, diagonal} == ids


def test_the_text_for_a_paper_states_that_a_part_was_measured(embedded: Embedded, finished: str) -> None:
    reasons = {"unsupported_layer": 648}
    counts = {"covered_share": 0.352, "trainable_parameters": 1000, "reasons": reasons}
    with Client(embedded.server.url) as client:
        results, rows = client.results(finished), list(client.layers(finished))
    part = dataclasses.replace(results.job, coverage=assess_coverage({"capacity": {"coverage": counts}}, None))
    said = methods_text(dataclasses.replace(results, job=part), rows)
    assert "Only 35.2% of the 1,000 trainable parameters were measured, and all figures are of that part" in said
    assert "not measured: 64.8% unsupported_layer." in said


def test_the_text_for_a_paper_says_what_was_multiplied_in_tf32(embedded: Embedded, finished: str) -> None:
    with Client(embedded.server.url) as client:
        results, rows = client.results(finished), list(client.layers(finished))
    said = ", with the products behind A and G in TF32"
    assert said not in methods_text(results, rows)
    rounded = [
        row if row.record is None
        else dataclasses.replace(row, record=dataclasses.replace(row.record, accumulation_precision="tf32"))
        for row in rows
    ]  # fmt: skip
    assert f"sums were in float32{said}." in methods_text(results, rounded)


def test_a_reader_that_stops_early_is_no_error(run: Run, finished: str) -> None:
    for options in ((), ("--json",)):
        reading, writing = os.pipe()
        os.close(reading)
        done = run("results", finished, *options, "--download", f"files{len(options)}", stdout=writing)
        os.close(writing)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert "Broken" not in done.stderr


def test_what_is_downloaded_overwrites_nothing_silently(run: Run, finished: str, tmp_path: Path) -> None:
    assert run("results", finished, "--download", "files").returncode == 0
    curve = tmp_path / "files" / "memory_curve.json"
    whole = curve.read_bytes()
    before = curve.stat().st_mtime_ns
    assert run("results", finished, "--download", "files").returncode == 0
    assert curve.stat().st_mtime_ns == before
    curve.write_text("mine")
    refused = run("results", finished, "--download", "files")
    assert refused.returncode == 2
    assert "memory_curve.json is there already, and is another file" in refused.stderr
    assert curve.read_text() == "mine"
    assert run("results", finished, "--download", "files", "--force").returncode == 0
    assert curve.read_bytes() == whole


@pytest.mark.parametrize(("command", "code"), [(("watch",), 0), (("submit", "job.json", "--wait"), 5)])
def test_ctrl_c_while_watching_is_no_error(
    command: tuple[str, ...], code: int, embedded: Embedded, tmp_path: Path
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(seeding.DOCUMENT))
    arguments = command
    if command == ("watch",):
        arguments = ("watch", seeding.running(embedded.engine, LOCAL_TENANT).job_id)
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    watching = subprocess.Popen(
        # a shell starts what runs in its background with the signal ignored
        ["env", "--default-signal=INT", *KRONOSCOPE, *arguments],
        cwd=tmp_path,
        env=environment(KRONOSCOPE_URL=embedded.server.url),
        **options,
    )
    assert watching.stderr is not None
    said = ""
    while "collection" not in said and "queued" not in said:  # it has seen the job
        said += watching.stderr.readline()
    time.sleep(0.3)
    os.kill(watching.pid, signal.SIGINT)
    _, rest = watching.communicate(timeout=60)
    assert watching.returncode == code, rest
    assert "no longer watching; the job goes on" in rest
    assert "error" not in rest
    assert "Traceback" not in rest


def test_logs_are_the_lines_and_states_of_a_job_and_obey_nothing_in_them(run: Run, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    lines = [f"line {number}" for number in range(120)]  # more than a page
    hostile = "\x1b[2J\x1b]0;owned\x07 gone\r\n2026-01-01 00:00:00 state   state succeeded \u202e"
    for message in (*lines, hostile):
        attempt_writes.write_log_line(embedded.engine, claim, LogLine(level="info", message=message))
    done = run("logs", claim.job_id[-12:])  # of a job that runs: what there is, and the end
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert [re.sub(r"^\S+ \S+ ", "", each) for each in shown[:2]] == [
        "state   queued, attempt 0",
        "state   running, attempt 1",
    ]
    assert [each.partition(" info    ")[2] for each in shown if " info    line " in each] == lines
    assert not {character for character in done.stdout if ord(character) < 32} - {"\n"}
    assert "\u202e" not in done.stdout
    assert "state succeeded" in shown[-1]  # within the line that said so
    assert " info    \ufffd[2J" in shown[-1]
    as_json = run("logs", claim.job_id, "--json")
    assert '"\\u001b[2J' in as_json.stdout
    # a line of JSON each, as the stream is followed
    events = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [each["data"]["message"] for each in events if each["type"] == "log"] == [*lines, hostile]


def test_followed_logs_end_with_the_job(embedded: Embedded, tmp_path: Path) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    command = [*KRONOSCOPE, "logs", claim.job_id, "-f"]
    variables = environment(KRONOSCOPE_URL=embedded.server.url)
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            while "started" not in process.stdout.readline():
                pass
            line = LogLine(level="warning", message="written while followed")
            attempt_writes.write_log_line(embedded.engine, claim, line)
            assert "warning written while followed" in process.stdout.readline()
            request_cancel(embedded.engine, LOCAL_TENANT, claim.job_id)
            attempt_endings.hand_back(embedded.engine, claim)
            assert "state   cancelled" in process.stdout.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
