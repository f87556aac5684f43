"""One job in the foreground: files, echo, exit codes, and nothing left running.

The run is forked where nothing is done to it; its child is always a program of its own.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from catalog.analyses.reconstruction import ReconstructionSummary
from catalog.frames import Failed, Finished, LayerDone, LogLine, Stopped, Summarised, decode, encode
from tests.machine.template.program import FOREGROUND
from worker.foreground import output_folder
from worker.foreground.output_folder import OutputFolder
from worker.process.log_lines import LogFormatter, closing_lines, layer_lines

DOCUMENT = {"kind": "capacity", "stabilisation": {"damping": 0.25}}
REPLACING = json.dumps({"document": DOCUMENT, "threads": 1, "replace": True}).encode()


@pytest.fixture
def foreground(scripted: Any, tmp_path: Any) -> Iterator[Any]:
    """Start a foreground run whose child follows a script; its standard input stays open."""
    with contextlib.ExitStack() as started:

        def start(
            *steps: Any, output: Any = tmp_path / "out", frames: Any = True, request: Any = None, end: Any = b"\n"
        ) -> Any:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", FOREGROUND, json.dumps(scripted(*steps)), "--output", str(output),
                 *(["--frames-to-stdout"] if frames else [])],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            started.callback(_close, process)
            raw = json.dumps({"document": DOCUMENT, "threads": 1}).encode() if request is None else request
            process.stdin.write(raw + end)
            process.stdin.flush()
            return process

        yield start


def _close(process: Any) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def frames_of(process: Any) -> Any:
    return [decode(line) for line in process.stdout]


def assignment_of(process: Any) -> Any:
    """The assignment of a run whose child writes it to its log."""
    said = [frame.message for frame in frames_of(process) if isinstance(frame, LogLine) and frame.level == "info"]
    return json.loads(said[0])


def json_file(path: Any) -> Any:
    return json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} in {path}"))


def test_a_run_fills_its_folder(foreground: Any, tmp_path: Any) -> None:
    process = foreground(
        ["started"], ["plan", {"peak_bytes": 10}], ["progress", "capacity", 0, 2],
        ["layer", 0, "conv"], ["artifact", "spectra/0.json", "{}"], ["layer", 1, "fc"],
        ["summary"], ["finish"],
    )  # fmt: skip
    frames = frames_of(process)
    assert process.wait(240) == 0
    assert frames[-1] == Finished()
    out = tmp_path / "out"
    job = json_file(out / "job.json")
    assert job["state"] == "succeeded"
    assert job["document"] == DOCUMENT
    assert job["environment"] == {"device": "cpu", "threads": 1}
    assert job["plan"] == {"peak_bytes": 10}
    assert [each["name"] for each in job["artifacts"]] == ["spectra/0.json"]
    assert (out / "artifacts" / "spectra" / "0.json").read_text() == "{}"
    results = json_file(out / "results.json")
    assert results["summary"] == {"capacity": {"layers": 1, "branches": {"eigendecomposition": 2}}}
    assert [row["layer"] for row in results["layers"]] == ["conv", "fc"]
    assert results["layers"][0]["observed"]["seconds"] == 0.1
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["ordinal"], line["layer"], line["status"]) for line in log] == [
        ("capacity", 0, "conv", "covered"),
        ("capacity", 1, "fc", "covered"),
    ]
    assert log[0]["policy"] == "dense"
    assert log[0]["seconds"] == 0.1
    assert sorted(path.name for path in out.iterdir()) == ["artifacts", "job.json", "log.jsonl", "results.json"]


def test_what_a_run_leaves_in_its_cache_the_next_one_finds(foreground: Any, tmp_path: Any) -> None:
    """The parent answers from a folder beside which its rows stand; of both nothing stays in the output."""
    key, files = "a" * 64, {"factors/0.safetensors": "factors", "factors/factors.index.json": "{}"}

    def run(name: str, *steps: Any) -> list[str]:
        cache = {"cache": str(tmp_path / "cache"), "cache_bytes": 10**6, "job": name}
        request = json.dumps({"document": DOCUMENT, "threads": 1, **cache}).encode()
        process = foreground(["started"], *steps, ["finish"], output=tmp_path / name, request=request)
        frames = frames_of(process)
        assert process.wait(240) == 0
        assert not list((tmp_path / name / "artifacts").glob(".*"))
        assert not list((tmp_path / name).glob(".*"))
        return [frame.message for frame in frames if isinstance(frame, LogLine)]

    run("first", ["fill_cache", key, files])
    assert json.loads(run("second", ["ask_cache", key])[0]) == {"job": "first", "files": files}
    (stored,) = (tmp_path / "cache").glob("*/factors/0.safetensors")
    stored.chmod(0o644)
    stored.write_text("scaled!")
    assert json.loads(run("third", ["ask_cache", key])[0]) == {"job": None, "files": {}}


def test_it_says_one_line_per_layer_and_one_at_the_end(foreground: Any) -> None:
    process = foreground(["layer", 0, "a\nb"], ["summary", "capacity"], ["finish"])
    info = [frame.message for frame in frames_of(process) if isinstance(frame, LogLine) and frame.level == "info"]
    assert len(info) == 2
    for symbol in ("λ_G=0.5", "policy=dense", "T=17", "κ_A=10", "κ_G=-"):
        assert symbol in info[0]
    assert "\n" not in info[0]
    for part in ("layers=1", "eigendecomposition=2", "policy=dense", "update_freq=1", "damping=0.25", "κ_max=1e+06"):
        assert part in info[1]


def test_the_closing_line_counts_each_layer_once_by_its_branch() -> None:
    formatter = LogFormatter({})
    branches = ["woodbury", "eigendecomposition", "woodbury", "softmax_head", "diagonal", "diagonal_block", "block"]
    for ordinal, branch in enumerate(branches):
        outcome = {"status": "covered", "record": {"branch": branch, "policy": "auto"}}
        formatter.lines(LayerDone(kind="capacity", ordinal=ordinal, layer=f"l{ordinal}", outcome=outcome, observed={}))
    declared = {"status": "declared", "record": {"branch": "declared"}}
    formatter.lines(LayerDone(kind="capacity", ordinal=7, layer="l7", outcome=declared, observed={}))
    (line,) = formatter.lines(Summarised(kind="capacity", summary={}))
    assert " woodbury=2 softmax=1 eigendecomposition=1 block=1 diagonal=2 policy=auto " in line.message
    # a summary speaks of earlier attempts' rows too
    (line,) = formatter.lines(Summarised(kind="capacity", summary={"branches": {"woodbury": 9, "new": 1}}))
    assert " woodbury=9 softmax=0 eigendecomposition=0 block=0 diagonal=0 new=1 " in line.message
    assert " woodbury=0 " in formatter.lines(Summarised(kind="reconstruction", summary={}))[0].message


def test_a_layers_line_says_what_is_stored_and_how_well_it_is_conditioned() -> None:
    record = {
        "branch": "woodbury", "dtype": "float32", "gradient_rows": 10, "gradient_rows_dtype": "float16",
        "gradient_rows_device": "host", "factor_bytes": 1_052_956, "storage_device": "cpu",
        "storage_policy": "resident",
        "kappa_A": None, "kappa_A_clipped": 1e6, "clipped_A": 321, "kappa_G": 40.5, "kappa_G_clipped": 40.5,
        "clipped_G": 0,
    }  # fmt: skip
    sides = {"A": {"kappa_reached": 1.0125e6}, "G": None}
    outcome = {"status": "covered", "record": record, "metrics": sides}
    (line,) = [line for line in layer_lines(done(outcome)) if line.level == "info"]
    assert " κ_A=inf→1e+06 κ_G=40.5 κ_A_stored=1.0125e+06 " in line.message
    assert " dtype_A=float32 dtype_G=float16 bytes=1052956 on=cpu (resident) rows_on=host " in line.message
    # without a limit nothing is clipped, and without a decomposition nothing is known
    for known, shown in ({"clipped_A": 0}, "κ_A=inf κ_G=-"), ({}, "κ_A=- κ_G=-"):
        (line, *_) = layer_lines(done({"status": "covered", "record": known}))
        assert shown in line.message


def done(outcome: dict[str, Any]) -> LayerDone:
    return LayerDone(kind="capacity", ordinal=0, layer="fc", outcome=outcome, observed={})


@pytest.mark.parametrize(
    ("stabilisation", "said"),
    [
        ({}, " damping=0.0001 (relative, pi) λ_A=0.01…0.3 λ_G=0.5 "),
        ({"damping_A": 0.02}, " damping=0.0001 damping_A=0.02 (relative, pi) λ_A=0.01…0.3 λ_G=0.5 "),
        ({"damping_A": 0.02, "damping_G": 3}, " damping_A=0.02 damping_G=3 (relative) λ_A=0.01…0.3 λ_G=0.5 "),
    ],
)
def test_the_closing_line_names_the_dampings_that_were_used(stabilisation: dict[str, Any], said: str) -> None:
    formatter = LogFormatter({"stabilisation": stabilisation})
    for ordinal, value in enumerate((0.3, 0.01, None)):
        record = {"branch": "eigendecomposition", "lambda_A": value, "lambda_G": 0.5}
        outcome = {"status": "covered", "record": record}
        formatter.lines(LayerDone(kind="capacity", ordinal=ordinal, layer="fc", outcome=outcome, observed={}))
    (line,) = formatter.lines(Summarised(kind="capacity", summary={}))
    assert said in line.message
    # another analysis has its own layers
    assert " λ_A=- λ_G=- " in formatter.lines(Summarised(kind="spectrum", summary={}))[0].message


def test_a_debug_line_says_how_the_sums_of_a_layer_were_reduced() -> None:
    record = {
        "branch": "woodbury", "positions_local": 96, "positions": 192, "world_size": 2, "reduction": "gram",
        "sent_bytes": 73_728, "factor_bytes": 1_052_956,
    }  # fmt: skip
    lines = [line for line in layer_lines(done({"status": "covered", "record": record})) if line.level == "debug"]
    assert [line.message for line in lines] == [
        "capacity 0 fc: T_local=96 T_global=192 world_size=2 reduction=gram sent_bytes=73728 factor_bytes=1052956"
    ]


def test_the_closing_line_of_a_reconstruction_says_what_was_clipped() -> None:
    names = ReconstructionSummary.__dataclass_fields__
    known = {"layers": 2, "factors": 4, "clipped": 31, "eigenvalues": 120, "floor_kept": 0.998, "kappa_reached": 1.5e6}
    assert known.keys() <= names.keys()
    summary = {**dict.fromkeys(names), "coverage": {}, "kappa_max": 1e6, "not_stabilised": [], **known}
    (line,) = closing_lines(Summarised(kind="reconstruction", summary=summary), {}, [])
    assert "factors=4 clipped=31 of 120 floor_kept=0.998 κ_reached=1.5e+06" in line.message
    assert "eigendecompositions" not in line.message


def test_layers_where_the_preconditioner_is_the_identity_are_warned_of() -> None:
    lines = closing_lines(Summarised(kind="capacity", summary={"identity_layers": ["fc"]}), {}, [])
    assert [line.level for line in lines] == ["info", "warning"]
    assert "λ exceeds λ_max in 1 layer(s) (fc)" in lines[1].message


@pytest.mark.parametrize(("category", "code"), [("usage", 2), ("transient", 3), ("fatal", 4)])
def test_a_failure_is_told_and_written(foreground: Any, tmp_path: Any, category: Any, code: Any) -> None:
    process = foreground(["layer", 0], ["fail", category])
    frames = frames_of(process)
    assert process.wait(240) == code
    assert isinstance(frames[-1], Failed)
    assert frames[-1].category == category
    job = json_file(tmp_path / "out" / "job.json")
    assert job["state"] == "failed"
    assert job["failure"]["message"] == "the script says so"
    assert len(json_file(tmp_path / "out" / "results.json")["layers"]) == 1


def test_a_crash_says_where(foreground: Any, tmp_path: Any) -> None:
    process = foreground(["progress", "capacity", 1, 5], ["layer", 3], ["kill_self"])
    frames = frames_of(process)
    assert process.wait(240) == 4
    assert isinstance(frames[-1], Failed)
    assert "SIGKILL" in frames[-1].message
    assert "capacity/3" in frames[-1].message
    assert json_file(tmp_path / "out" / "job.json")["failure"]["code"] == "crashed"


@pytest.mark.real_programs
@pytest.mark.parametrize("how", ["lifeline", signal.SIGTERM, signal.SIGINT])
def test_it_stops_cleanly(foreground: Any, tmp_path: Any, ended: Any, how: Any) -> None:
    process = foreground(["pids"], ["layer", 0], ["wait_for_sigterm"])
    pids = json.loads(decode(process.stdout.readline()).message)
    process.stdout.readline()
    if how == "lifeline":
        process.stdin.close()
    else:
        process.send_signal(how)
    assert frames_of(process)[-1] == Stopped()
    assert process.wait(240) == 5
    assert ended(pids, 0)
    assert json_file(tmp_path / "out" / "job.json")["state"] == "cancelled"


@pytest.mark.real_programs
def test_asked_twice_it_ends_a_child_that_will_not_stop(foreground: Any, ended: Any) -> None:
    process = foreground(["ignore_sigterm"], ["pids"], ["sleep", 600])
    pids = json.loads(decode(process.stdout.readline()).message)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    assert frames_of(process)[-1] == Stopped()
    assert process.wait(240) == 5
    assert ended(pids, 0)


@pytest.mark.real_programs
def test_killed_with_minus_9_it_leaves_nothing(foreground: Any, ended: Any) -> None:
    process = foreground(["ignore_sigterm"], ["pids"], ["sleep", 600])
    pids = json.loads(decode(process.stdout.readline()).message)
    process.kill()
    assert ended(pids)


@pytest.mark.real_programs
def test_a_reader_who_goes_away_ends_the_run(foreground: Any, ended: Any) -> None:
    process = foreground(["pids"], ["chatter", 200], ["wait_for_sigterm"])
    pids = json.loads(decode(process.stdout.readline()).message)
    process.stdout.close()
    process.stdout = Path(os.devnull).open()  # noqa: SIM115 - closed with the process
    assert process.wait(240) == 5
    assert ended(pids, 0)


def test_a_request_without_its_newline_leaves_the_lifeline_out(foreground: Any) -> None:
    process = foreground(["log", "x"], ["finish"], end=b"")
    process.stdin.close()
    assert frames_of(process)[-1] == Finished()
    assert process.wait(240) == 0


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("request_", [b"", b"{", b"[]", b"{}", b"[" * 100_000])
def test_a_request_that_is_none_is_a_usage_error(foreground: Any, tmp_path: Any, request_: Any) -> None:
    process = foreground(["finish"], request=request_)
    frames = frames_of(process)
    assert process.wait(240) == 2
    assert [type(frame) for frame in frames] == [Failed]
    assert b"Traceback" not in process.stderr.read()
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_a_usage_error(foreground: Any, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("mine")
    process = foreground(["finish"], output=tmp_path / "file")
    frames = frames_of(process)
    assert process.wait(240) == 2
    assert frames[0].code == "output_refused"
    assert (tmp_path / "file").read_text() == "mine"


def test_foreign_files_are_never_overwritten(foreground: Any, tmp_path: Any) -> None:
    out = tmp_path / "out"
    (out / "artifacts").mkdir(parents=True)
    (out / "artifacts" / "thesis.txt").write_text("mine")
    process = foreground(["finish"])
    assert frames_of(process)[0].code == "output_refused"
    assert process.wait(240) == 2
    assert (out / "artifacts" / "thesis.txt").read_text() == "mine"


def test_an_earlier_run_makes_way(foreground: Any, tmp_path: Any) -> None:
    first = foreground(["artifact", "old.json", "{}"], ["layer", 0], ["finish"])
    frames_of(first)
    assert first.wait(240) == 0
    second = foreground(["layer", 5], ["layer", 2], ["finish"], request=REPLACING)
    frames_of(second)
    assert second.wait(240) == 0
    assert not (tmp_path / "out" / "artifacts" / "old.json").exists()
    # layers come by size, and are listed in the model's order
    assert [row["ordinal"] for row in json_file(tmp_path / "out" / "results.json")["layers"]] == [2, 5]
    assert len((tmp_path / "out" / "log.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("refused", [[["fail", "usage"]], [["raw", encode(Stopped()).decode()], ["exit", 5]]])
def test_a_run_that_is_refused_gives_an_earlier_one_back(foreground: Any, tmp_path: Any, refused: Any) -> None:
    out = tmp_path / "out"
    first = foreground(["artifact", "old.json", "{}"], ["layer", 0], ["finish"])
    frames_of(first)
    assert first.wait(240) == 0
    (out / "mine.txt").write_text("mine")
    before = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    request = json.dumps({"document": {**DOCUMENT, "labels": {"a": "b"}}}).encode()
    second = foreground(["artifact", "new.json", "{}"], *refused, request=request)
    frames_of(second)
    assert second.wait(240) in (2, 5)
    assert {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_run_that_fails_later_keeps_what_it_has(foreground: Any, tmp_path: Any) -> None:
    out = tmp_path / "out"
    frames_of(foreground(["artifact", "old.json", "{}"], ["layer", 0], ["finish"]))
    second = foreground(["layer", 5], ["fail", "usage"], request=REPLACING)
    frames_of(second)
    assert second.wait(240) == 2
    assert json_file(out / "job.json")["state"] == "failed"
    assert [row["ordinal"] for row in json_file(out / "results.json")["layers"]] == [5]
    assert sorted(path.name for path in out.iterdir()) == ["artifacts", "job.json", "log.jsonl", "results.json"]
    assert not list((out / "artifacts").iterdir())


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("name", ["../escape.json", "/etc/escape.json", "a/../../b.json", ".hidden", ""])
def test_artifacts_stay_in_their_folder(foreground: Any, tmp_path: Any, name: Any) -> None:
    announced = {"frame": "artifact", "name": name, "sha256": "0" * 64, "size_bytes": 0, "media_type": "x/y"}
    process = foreground(["raw", json.dumps(announced) + "\n"], ["sleep", 600])
    assert frames_of(process)[-1].code == "artifact_damaged"
    assert process.wait(240) == 4


def test_an_artifact_that_is_not_what_was_announced_ends_the_run(foreground: Any) -> None:
    process = foreground(["artifact", "a.json", "one", "two"], ["sleep", 600])
    frames = frames_of(process)
    assert process.wait(240) == 4
    assert frames[-1].code == "artifact_damaged"


def test_without_frames_it_speaks_to_people(foreground: Any) -> None:
    process = foreground(["say", "from the child"], ["fail", "usage"], frames=False)
    assert process.stdout.read() == b""
    assert process.wait(240) == 2
    assert process.stderr.read().decode().splitlines() == ["from the child", "error: the script says so"]


@pytest.mark.real_programs
def test_a_killed_run_is_gone_on_with_and_any_other_is_not(foreground: Any, tmp_path: Any) -> None:
    output = tmp_path / "out"

    def killed() -> None:
        process = foreground(["plan", {"parts": [["a"], ["b"]]}], ["pids"], ["sleep", 600])
        while b"[" not in process.stdout.readline().partition(b'"message"')[2]:
            pass
        process.kill()
        process.wait()
        (output / ".waiting").mkdir(exist_ok=True)
        (output / ".waiting" / "sums").touch()

    killed()
    process = foreground(["echo_assignment"], ["finish"])
    told = assignment_of(process)
    assert told["plan"]["parts"] == [["a"], ["b"]]
    assert (told["scratch"], told["checkpoint_seconds"]) == (str(output / ".waiting"), 60)
    assert not (output / ".waiting").exists()
    killed()
    other = json.dumps({"document": {**DOCUMENT, "labels": {"a": "b"}}}).encode()
    process = foreground(["echo_assignment"], ["wait_for", str(tmp_path / "go")], ["finish"], request=other)
    told = json.loads(decode(process.stdout.readline()).message)
    assert told["plan"] is None
    assert not (output / ".waiting").exists()
    (tmp_path / "go").touch()
    assert isinstance(frames_of(process)[-1], Finished)


def test_a_run_that_ended_by_no_fault_of_its_document_is_gone_on_with(foreground: Any, tmp_path: Any) -> None:
    output = tmp_path / "out"
    plan = ["plan", {"parts": [["a"], ["b"]]}]

    def told_to_the_next() -> Any:
        return assignment_of(foreground(["echo_assignment"], ["finish"]))["plan"]

    overdue = Failed(category="usage", code="deadline_exceeded", message="late", pointer=None, layer=None, detail=None)
    for end, state, goes_on in (
        (["kill_self"], "failed", True),
        (["fail", "fatal"], "failed", True),
        (["raw", encode(Stopped()).decode()], "cancelled", True),
        (["raw", encode(overdue).decode()], "failed", True),
        (["fail", "usage"], "failed", False),
    ):
        process = foreground(["work_in_scratch"], plan, ["layer", 0], end, ["exit", 5], request=REPLACING)
        frames_of(process)
        process.wait(240)
        assert json_file(output / "job.json")["state"] == state
        assert (output / ".waiting" / "sums").exists() == goes_on
        if not goes_on:
            # its rows are results, which another run does not replace
            assert foreground(["finish"]).wait(240) == 2
            break
        # one that is refused before its first row leaves all as it was
        frames_of(foreground(["fail", "usage"]))
        assert json_file(output / "job.json")["state"] == state
        assert [row["ordinal"] for row in json_file(output / "results.json")["layers"]] == [0]
        assert (output / ".waiting" / "sums").exists()
        assert told_to_the_next() == {"parts": [["a"], ["b"]]}
        assert json_file(output / "job.json")["state"] == "succeeded"
        assert not (output / ".waiting").exists()


def test_what_stands_without_a_record_makes_way(foreground: Any, tmp_path: Any) -> None:
    (tmp_path / "out" / ".waiting").mkdir(parents=True)
    assert isinstance(frames_of(foreground(["finish"]))[-1], Finished)
    assert not (tmp_path / "out" / ".waiting").exists()


def test_a_clock_that_is_set_back_ends_no_run_before_its_start(tmp_path: Any, monkeypatch: Any) -> None:
    folder = OutputFolder(tmp_path, {}, DOCUMENT, lambda _: None)
    earlier = datetime.now(UTC) - timedelta(hours=2)
    monkeypatch.setattr(output_folder, "datetime", SimpleNamespace(now=lambda _: earlier))
    folder.end("succeeded", None)
    job = json_file(tmp_path / "job.json")
    assert 0 <= job["seconds"] < 3600
    assert job["finished_at"] >= job["started_at"]


def test_a_run_ends_at_its_deadline(foreground: Any, tmp_path: Any) -> None:
    for within in ("3s", "240s"):  # the second where the machine is too busy to do a layer within the first
        out = tmp_path / within
        document = DOCUMENT | {"schedule": {"within": within}}
        request = json.dumps({"document": document, "threads": 1}).encode()
        process = foreground(["layer", 0], ["wait_for_sigterm"], request=request, output=out)
        frames = frames_of(process)
        assert process.wait(240) == 2
        last = frames[-1]
        assert (last.category, last.code, last.pointer) == ("usage", "deadline_exceeded", "/schedule")
        job = json_file(out / "job.json")
        assert (job["state"], job["document"]) == ("failed", DOCUMENT)
        rows = [row["ordinal"] for row in json_file(out / "results.json")["layers"]]
        if rows:
            break
    assert rows == [0]


def test_a_run_whose_deadline_has_passed_does_not_begin(foreground: Any, tmp_path: Any) -> None:
    document = DOCUMENT | {"schedule": {"deadline": "2020-01-01T00:00Z"}}
    process = foreground(["finish"], request=json.dumps({"document": document}).encode())
    (refused,) = frames_of(process)
    assert (process.wait(240), refused.code) == (2, "in_the_past")
    assert "give a later one" in refused.message
    assert not (tmp_path / "out").exists()


def test_a_schedule_is_no_part_of_what_a_run_computes(foreground: Any) -> None:
    """Else a checkpoint would be thrown away because the next run has more time."""
    for schedule, passed_on in (({"within": "1h"}, False), ({"within": "soon"}, True)):
        document = DOCUMENT | {"schedule": schedule}
        process = foreground(["echo_assignment"], ["finish"], request=json.dumps({"document": document}).encode())
        told = json.loads(frames_of(process)[0].message)["document"]
        assert told == (document if passed_on else DOCUMENT)
        assert process.wait(240) == 0


def test_a_run_that_is_done_in_time_is_done(foreground: Any) -> None:
    document = DOCUMENT | {"schedule": {"priority": 3, "within": "1h"}}
    process = foreground(["finish"], request=json.dumps({"document": document}).encode())
    assert frames_of(process) == [Finished()]
    assert process.wait(240) == 0  # and does not wait for its deadline
