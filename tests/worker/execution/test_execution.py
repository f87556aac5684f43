import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from catalog.frames import (
    ArtifactWritten,
    Failed,
    Finished,
    Frame,
    LayerDone,
    LogLine,
    Progress,
    Started,
    Stopped,
    Summarised,
    decode,
    encode,
)
from engine.errors import NotConverged, OutOfMemory, WrongShape
from worker.execution.attempt import parse_document
from worker.execution.failures import DocumentRefused, failure_of
from worker.execution.frame_pipe import FramePipe
from worker.execution.job_inputs import DATA_SOURCES, MODEL_SOURCES
from worker.execution.refusal import Refusal, Unavailable
from worker.execution.resolve import resolve
from worker.foreground.output_folder import require_artifact
from worker.process.child_process import Child

DOCUMENT = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits", "limit": 200},
    "task": {"type": "classification"},
    "collection": {"self_check": "off"},
}


def assignment(store: Path, artifacts: Path, document: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "document": document,
        "artifacts": str(artifacts),
        "completed": [],
        "threads": 1,
        "paths": [],
        "allowed": {"factories": ["*"], "directories": ["*"]},
        "store": str(store),
        "offline": True,
        "factors_path": None,
        **more,
    }


def start(given: dict[str, Any]) -> Child:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Child.start(given, subprocess.DEVNULL, environment)


def run(given: dict[str, Any]) -> tuple[list[Frame], int]:
    child = start(given)
    try:
        frames = list(child.frames())
        return frames, child.wait(300)
    finally:
        child.close()


def test_passes_of_the_first_attempt_are_made_again(
    store: Path, tmp_path: Path, done: tuple[list[Frame], int, Path]
) -> None:
    first = {
        frame.ordinal: frame.outcome for frame in done[0] if isinstance(frame, LayerDone) and frame.kind == "factors"
    }
    names = [outcome["layer"] for outcome in first.values()]
    (tmp_path / ".waiting").mkdir()
    (tmp_path / ".waiting" / "of a killed attempt").touch()
    frames, code = run(assignment(store, tmp_path, DOCUMENT, plan={"threads": 1, "parts": [[name] for name in names]}))
    assert code == 0
    assert not (tmp_path / ".waiting").exists()
    again = [frame.outcome for frame in frames if isinstance(frame, LayerDone) and frame.kind == "factors"]
    for outcome in again:
        record, before = outcome["record"], first[outcome["ordinal"]]["record"]
        assert (record["digest_A"], record["digest_G"]) == (before["digest_A"], before["digest_G"])
        assert (record["passes"], record["storage_policy"]) == (len(names), "laid aside")
        assert (before["passes"], before["storage_policy"]) == (1, "resident")


@pytest.fixture(scope="module")
def done(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Frame], int, Path]:
    artifacts = tmp_path_factory.mktemp("artifacts")
    frames, code = run(assignment(store, artifacts, DOCUMENT))
    return frames, code, artifacts


def test_the_frames_of_a_job_come_in_their_order(done: tuple[list[Frame], int, Path]) -> None:
    frames, code, artifacts = done
    assert code == 0
    assert isinstance(frames[0], Started)
    assert isinstance(frames[-1], Finished)
    assert frames[0].environment["threads"] == 1
    assert [frame.kind for frame in frames if isinstance(frame, Summarised)] == ["factors", "capacity"]
    rows = [(frame.kind, frame.ordinal) for frame in frames if isinstance(frame, LayerDone)]
    assert rows == [(kind, ordinal) for kind in ("factors", "capacity") for ordinal in range(3)]
    assert {frame.stage for frame in frames if isinstance(frame, Progress)} >= {"model", "data", "collection"}
    written = [frame for frame in frames if isinstance(frame, ArtifactWritten)]
    assert {frame.name for frame in written} >= {
        "factors/factors.index.json",
        "factors/0.safetensors",
        "spectra/2.json",
    }
    for frame in written:
        require_artifact(artifacts, frame)


def test_completed_rows_are_not_sent_again(done: tuple[list[Frame], int, Path], store: Path, tmp_path: Path) -> None:
    given = assignment(store, tmp_path, DOCUMENT, completed=[["factors", 0], ["factors", 2], ["capacity", 1]])
    frames, code = run(given)
    assert code == 0
    rows = [frame for frame in frames if isinstance(frame, LayerDone)]
    assert [(row.kind, row.ordinal) for row in rows] == [("factors", 1), ("capacity", 0), ("capacity", 2)]
    first = {(row.kind, row.ordinal): row.outcome for row in done[0] if isinstance(row, LayerDone)}
    for row in rows:
        assert row.outcome["metrics"] == first[row.kind, row.ordinal]["metrics"]


def test_factors_of_an_earlier_job_are_read_where_the_parent_found_them(
    done: tuple[list[Frame], int, Path], store: Path, tmp_path: Path
) -> None:
    document = {"kind": "capacity", "factors": {"job": "0190"}}
    frames, code = run(assignment(store, tmp_path, document, factors_path=str(done[2] / "factors")))
    assert code == 0, frames[-1]
    first = {
        row.ordinal: row.outcome["metrics"] for row in done[0] if isinstance(row, LayerDone) and row.kind == "capacity"
    }
    assert {row.ordinal: row.outcome["metrics"] for row in frames if isinstance(row, LayerDone)} == first


def test_two_sets_are_compared_where_the_parent_found_them_or_by_their_paths(
    done: tuple[list[Frame], int, Path], store: Path, tmp_path: Path
) -> None:
    kept = str(done[2] / "factors")
    document: dict[str, Any] = {"kind": "compare_curvature", "factors": {"job": "1"}}
    document["compare_curvature"] = {"against": {"job": "2"}, "k": [1, 3]}
    there = assignment(store, tmp_path / "laid-out", document, factors_path=kept, against_path=kept)
    by_path = assignment(
        store,
        tmp_path / "by-path",
        {
            "kind": "compare_curvature",
            "factors": {"path": str(done[2])},
            "compare_curvature": {"against": {"path": kept}, "k": [1, 3]},
        },
    )
    found = []
    for given in (there, by_path):
        frames, code = run(given)
        assert code == 0, frames[-1]
        (summary,) = [frame.summary for frame in frames if isinstance(frame, Summarised)]
        rows = {row.ordinal: row.outcome["metrics"] for row in frames if isinstance(row, LayerDone)}
        assert (summary["distance"], summary["divergence"], summary["layers"]) == (0, 0, 3)
        last = frames[-1]
        assert isinstance(last, Finished)
        assert last.factors_sha256 == last.against_sha256 == summary["factors_sha256"] == summary["against_sha256"]
        assert (last.model_sha256, last.data_sha256) == (None, None)
        assert [each["overlap"] for each in rows[0]["G"]["overlaps"]] == pytest.approx([1, 1], abs=1e-12)
        found.append((summary, rows))
    assert found[0] == found[1]
    # the model that they came from gives the same set again
    collecting = DOCUMENT | {"kind": "compare_curvature", "compare_curvature": {"against": {"path": kept}, "k": [1]}}
    frames, code = run(assignment(store, tmp_path / "collected", collecting))
    assert code == 0, frames[-1]
    (summary,) = [frame.summary for frame in frames if isinstance(frame, Summarised)]
    assert (summary["distance"], summary["differences"]) == (0, [])
    assert summary["factors_sha256"] == found[0][0]["against_sha256"]
    last = frames[-1]
    assert isinstance(last, Finished)
    assert (last.factors_sha256, last.against_sha256) == (None, summary["against_sha256"])
    assert last.model_sha256 is not None


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(
    ("against", "pointer", "said"),
    [
        ({"job": "0190"}, "/compare_curvature/against/job", "give `compare_curvature.against.path: FOLDER`"),
        ({"path": "{there}/0.safetensors"}, "/compare_curvature/against/path", "is a file; give the folder"),
        ({"path": "{there}/.."}, None, None),
        ({"path": "{there}/nothing"}, "/compare_curvature/against/path", "does not exist on this machine"),
        ({"path": "{torn}"}, "/compare_curvature/against", "is not valid JSON"),
    ],
)
def test_a_second_set_that_cannot_be_read_is_named_by_its_own_field(
    done: tuple[list[Frame], int, Path],
    store: Path,
    tmp_path: Path,
    against: Any,
    pointer: str | None,
    said: str | None,
) -> None:
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "factors.index.json").write_text('{"format"')
    there = str(done[2] / "factors")
    named = {name: path.format(there=there, torn=torn) for name, path in against.items()}
    document = {"kind": "compare_curvature", "factors": {"path": there}, "compare_curvature": {"against": named}}
    frames, code = run(assignment(store, tmp_path / "out", document))
    if pointer is None:
        assert code == 0, frames[-1]
        return
    last = frames[-1]
    assert isinstance(last, Failed)
    assert (code, last.category, last.pointer) == (2, "usage", pointer)
    assert str(said) in last.message


ENDLESS = """
import torch

def data():
    while True:
        yield torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
"""


def test_sigterm_stops_at_a_checkpoint(store: Path, tmp_path: Path) -> None:
    # there is one at every batch, and it comes to no end by itself, however late the signal is
    (tmp_path / "endless_for_kronoscope.py").write_text(ENDLESS)
    document = DOCUMENT | {"data": {"source": "factory", "factory": "endless_for_kronoscope:data"}}
    child = start(assignment(store, tmp_path, document, paths=[str(tmp_path)]))
    try:
        frames: list[Frame] = []
        for frame in child.frames():
            frames.append(frame)
            if isinstance(frame, Progress) and frame.stage == "collection" and frame.done > 0:
                child.terminate()
        assert isinstance(frames[-1], Stopped)
        assert child.wait(300) == 5
    finally:
        child.close()


def test_a_refused_document_is_one_failed_frame(store: Path, tmp_path: Path) -> None:
    frames, code = run(assignment(store, tmp_path, {**DOCUMENT, "collection": {"batch_size": 0}, "keep": ["all"]}))
    failed = frames[-1]
    assert isinstance(failed, Failed)
    assert code == 2
    assert failed.category == "usage"
    assert failed.pointer == "/collection/batch_size"
    assert "/collection/batch_size is 0" in failed.message
    assert "/keep/0" in failed.message
    assert not list(tmp_path.iterdir())


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(("part", "task"), [("model", "sentence_embedding"), ("data", "classification")])
def test_what_was_never_fetched_is_not_looked_for_offline(store: Path, tmp_path: Path, part: str, task: str) -> None:
    absent = {"source": "huggingface", "id": "nobody/nothing-of-this-name"}
    document = {**DOCUMENT, "task": {"type": task}, part: absent}
    frames, code = run(assignment(store, tmp_path, document))
    failed = frames[-1]
    assert isinstance(failed, Failed)
    assert (code, failed.category, failed.pointer) == (2, "usage", f"/{part}/id")
    assert "this machine" in failed.message


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"kind": "nothing"}, "/kind"),
        ({"model": {"source": "nowhere"}}, "/model/source"),
        ({"model": {"source": "builtin", "name": "resnet"}}, "/model/name"),
        ({"collection": {"batch_size": "12"}}, "/collection/batch_size"),
        ({"collection": {"batch_size": 3.0}}, "/collection/batch_size"),
        ({"collection": {"batch_size": True}}, "/collection/batch_size"),
        ({"stabilisation": {"damping": 0}}, "/stabilisation/damping"),
        ({"memory": {"host": "-3GiB"}}, "/memory/host"),
        ({"surprise": 1}, "/surprise"),
    ],
)
def test_documents_are_validated_strictly(changes: dict[str, Any], pointer: str) -> None:
    with pytest.raises(DocumentRefused) as refused:
        parse_document({**DOCUMENT, **changes})
    assert refused.value.complaints[0].pointer == pointer


def test_whole_numbers_are_good_enough_for_real_ones() -> None:
    assert parse_document({**DOCUMENT, "stabilisation": {"damping": 1}}).stabilisation.damping == 1.0


@pytest.mark.parametrize(
    ("error", "category", "code"),
    [
        (Refusal("no", pointer="/model"), "usage", "invalid_value"),
        (Unavailable("later", pointer="/model"), "transient", "invalid_value"),
        (WrongShape("no", layer="fc"), "usage", "wrong_shape"),
        (NotConverged("no", layer="fc"), "fatal", "not_converged"),
        (MemoryError(), "usage", "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), "usage", "out_of_memory"),
        (RuntimeError("CUDA error: CUSOLVER_STATUS_ALLOC_FAILED when calling"), "usage", "out_of_memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "transient", "device_lost"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "transient", "device_lost"),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling"), "transient", "device_lost"),
        (RuntimeError("CUDA error: misaligned address"), "transient", "device_lost"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"), "transient", "device_lost"),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling"), "usage", "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling"), "fatal", "unexpected"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), "fatal", "unexpected"),
        (OutOfMemory("no", layer="fc"), "usage", "out_of_memory"),
        (OSError(28, "No space left on device"), "transient", "disk_full"),
        (OSError(5, "Input/output error"), "transient", "machine"),
        (SystemExit(3), "fatal", "unexpected"),
        (KeyError("secret-token"), "fatal", "unexpected"),
    ],
)
def test_every_exception_says_who_acts(error: BaseException, category: str, code: str) -> None:
    failed = failure_of(error)
    assert (failed.category, failed.code) == (category, code)
    assert "secret-token" not in failed.message
    assert failed.detail is not None


def test_a_full_disk_says_who_tries_again(tmp_path: Path) -> None:
    """A foreground run is not tried again by itself."""
    said = failure_of(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))).message
    assert f"the disk of {tmp_path} is full" in said
    assert "a service tries the job again after a pause, and `kronoscope run` once it is called again" in said


def test_a_failure_that_quotes_halves_of_characters_can_be_sent() -> None:
    failed = failure_of(Refusal("names `\ud800` and `\0`"))
    assert failed.message == "names `\\ud800` and `\\x00`"
    assert decode(encode(failed)) == failed


def test_progress_is_throttled_but_its_ends_are_not() -> None:
    read, write = os.pipe()
    pipe = FramePipe(write)
    for done in range(1, 1001):
        pipe.report("collection", done, 1000, "batches")
    os.close(write)
    with os.fdopen(read) as lines:
        sent = [json.loads(line)["done"] for line in lines]
    assert sent[0] == 1
    assert sent[-1] == 1000
    assert len(sent) < 20


@pytest.mark.parametrize("name", [*MODEL_SOURCES.values(), *DATA_SOURCES.values()])
def test_every_source_resolves(name: str) -> None:
    assert callable(resolve(name))


def test_the_real_encoder_is_covered_or_declared(store: Path, tmp_path: Path, minilm: Path) -> None:
    document = {
        "kind": "factors",
        "model": {"source": "directory", "path": str(minilm)},
        "data": {"source": "builtin", "name": "english", "limit": 4},
        "task": {"type": "sentence_embedding"},
        "collection": {"batch_size": 4, "self_check": "off"},
        "keep": [],
    }
    frames, code = run(assignment(store, tmp_path, document))
    assert code == 0, frames[-1]
    (summary,) = (frame.summary for frame in frames if isinstance(frame, Summarised))
    coverage = summary["coverage"]
    assert coverage["trainable_parameters"] == 22_713_216
    assert coverage["covered_parameters"] + coverage["declared_parameters"] == coverage["trainable_parameters"]
    assert coverage["reasons"] == {"no_gradient": 147_840}
    declared = [row for row in frames if isinstance(row, LayerDone) and row.outcome["status"] == "declared"]
    assert [row.layer for row in declared] == ["pooler.dense"]
    packed = safetensors.torch.load_file(tmp_path / "factors" / "0.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in packed.values())


def test_what_was_not_read_as_it_stands_is_in_the_last_frame(store: Path, tmp_path: Path, minilm: Path) -> None:
    rows = [{"text": "word " * 40, "id": number} for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "kind": "factors",
        "model": {"source": "directory", "path": str(minilm)},
        "data": {"source": "file", "path": str(tmp_path / "rows.jsonl"), "sequence_length": 8},
        "task": {"type": "sentence_embedding"},
        "collection": {"self_check": "off"},
    }
    frames, code = run(assignment(store, tmp_path / "artifacts", document))
    assert code == 0
    last = frames[-1]
    assert isinstance(last, Finished)
    assert "`id` of rows.jsonl" in last.unused
    assert "file `vocab.txt`" in last.unused
    said = "3 of 3 texts are longer than 8 tokens and are cut there: `sequence_length`, which can be raised"
    step, *rest = last.notices
    assert "own `Normalize`, a step in `modules.json`, is not applied" in step
    assert rest == [said]
    warnings = [frame.message for frame in frames if isinstance(frame, LogLine) and frame.level == "warning"]
    assert warnings == [step, said]
