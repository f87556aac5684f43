import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from catalog import ANALYSES
from engine.errors import BrokenFactors
from jobs.codec import document_json, parse_document, sha256_of
from kronoscope.cli.documents import read_document
from kronoscope.local import load_factors, load_stabilised
from tests.kronoscope.conftest import KRONOSCOPE, environment, settings

Run = Callable[..., subprocess.CompletedProcess[str]]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def ran(folder: Path, kronoscope: Run) -> Path:
    done = kronoscope("run", "job.yaml", "--output", "out", "--verbose")
    assert done.returncode == 0, done.stderr
    assert "factors: 2 layers" in done.stdout
    assert "100.0% of 83 trainable parameters covered" in done.stdout
    assert "stages: planned, measured, error" in done.stdout
    for said in ("λ_G=", "policy=", "T=", "κ_A=", "κ_G="):
        assert said in done.stderr
    return folder / "out"


@pytest.mark.part(of=2, law="a run leaves what it promises")
def test_a_run_leaves_everything_it_promises(ran: Path, kronoscope: Run) -> None:
    job = json.loads((ran / "job.json").read_text())
    assert job["state"] == "succeeded"
    assert job["environment"]["packages"]["torch"] == torch.__version__
    assert job["plan"]["host_peak_bytes"] > 0
    results = json.loads((ran / "results.json").read_text())
    assert set(results["summary"]) == {"factors", "capacity"}
    assert [(row["kind"], row["layer"]) for row in results["layers"]] == [
        ("factors", "0"), ("factors", "2"), ("capacity", "0"), ("capacity", "2"),
    ]  # fmt: skip
    records = lines_of(ran / "log.jsonl")
    assert len(records) == 4
    assert records[0]["in_dim"] == 7
    assert records[0]["digest_A"]
    assert records[0]["positions"] == 40
    curve = json.loads((ran / "artifacts" / "memory_curve.json").read_text())
    *stages, whole = curve["stages"]
    assert [stage["stage"] for stage in stages] == ["collection", "decomposition", "capacity"]
    assert all(stage["measured_host_bytes"] > 0 < stage["planned_host_bytes"] for stage in stages)
    # from the start of the process: imports are counted, too
    assert (whole["stage"], whole["measured_host_bytes"]) == ("whole job", None)
    assert whole["measured_seconds"] > sum(stage["measured_seconds"] for stage in stages)
    assert curve["seconds_range"][0] < whole["planned_seconds"] < curve["seconds_range"][1]
    written = {path.relative_to(ran / "artifacts").as_posix() for path in (ran / "artifacts").rglob("*.*")}
    assert written == {
        "factors/0.safetensors",
        "factors/1.safetensors",
        "factors/factors.index.json",
        "memory_curve.json",
        "spectra/0.json",
        "spectra/1.json",
    }
    spectrum = json.loads((ran / "artifacts" / "spectra" / "0.json").read_text())
    assert len(spectrum["A"]) == 7
    assert spectrum["A"] == sorted(spectrum["A"])
    packed = safetensors.torch.load_file(ran / "artifacts" / "factors" / "0.safetensors")
    assert packed["activation_covariance"].shape == (28,)
    a = load_factors(ran, verify=True)["0"].A
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).double()
    rows = torch.cat([inputs, torch.ones(40, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(a, rows.T @ rows / 40, rtol=1e-12, atol=1e-12)

    # the same job again: every digest is equal, but that of what was held when
    again = kronoscope("run", "job.yaml", "--output", "again")
    assert again.returncode == 0, again.stderr
    digests = [
        {entry["name"]: entry["sha256"] for entry in json.loads((out / "job.json").read_text())["artifacts"]}
        for out in (ran, ran.parent / "again")
    ]
    assert all(each.pop("memory_curve.json") for each in digests)
    assert digests[0] == digests[1]

    # factors that were kept are analysed without model or data, to the same metrics
    (ran.parent / "stored.yaml").write_text("kind: capacity\nfactors: {path: out}\n")
    stored = kronoscope("run", "stored.yaml", "--output", "stored", "--json")
    assert stored.returncode == 0, stored.stderr
    assert json.loads(stored.stdout)["finished"]
    found = json.loads((ran.parent / "stored" / "results.json").read_text())["layers"]
    fresh = [row for row in results["layers"] if row["kind"] == "capacity"]
    assert [row["metrics"] for row in found] == [row["metrics"] for row in fresh]


@pytest.mark.part(of=2, law="a run leaves what it promises")
def test_a_folder_has_results_as_a_job_of_a_service_has(ran: Path, kronoscope: Run) -> None:
    job, results = (json.loads((ran / name).read_text()) for name in ("job.json", "results.json"))
    shown = kronoscope("results", "out")
    assert shown.returncode == 0, shown.stderr
    assert "capacity: 2 layers; 100.0% of 83 trainable parameters" in shown.stdout
    told = json.loads(kronoscope("results", "out", "--json").stdout)
    assert [(row["kind"], row["layer"]) for row in told["layers"]] == [
        (row["kind"], row["layer"]) for row in results["layers"]
    ]
    assert told["layers"][0]["metrics"]["trace_A"] == results["layers"][0]["metrics"]["trace_A"]
    said = kronoscope("results", "out", "--methods").stdout
    assert "We computed the Kronecker factors A and G of each layer; the spectra, traces and effective" in said
    assert "40 examples, 40 loss terms entered a plain average, in batches of 16, with seed 0" in said
    document = parse_document(json.dumps(read_document(ran.parent / "job.yaml")).encode())
    digest = sha256_of(document_json(document))
    assert f"the model {job['model_sha256']}; the data {job['data_sha256']}; the job document {digest}." in said
    for arguments, code, sentence in (
        (("out/artifacts",), 2, "holds no job.json; give the folder that `kronoscope run` was given as --output"),
        (("./nowhere",), 2, "holds no job.json"),
        (("out", "--download", "there"), 2, "the files of out are there already"),
    ):
        wrong = kronoscope("results", *arguments)
        assert (wrong.returncode, sentence in wrong.stderr) == (code, True), wrong.stderr


BAD = {
    "several faults at once": (
        ["kind=cappacity", "model={source: nowhere}", "collection.damping=1e-4", "task.loss=3"],
        ["/kind", "factors", "/model/source", "/collection/damping", "stabilisation.damping", "/task/loss"],
    ),
    "no model": (["model=null"], ["/model is missing"]),
    "a negative batch size": (["collection.batch_size=-2", "collection.seed=-1"], ["/collection/batch_size is -2"]),
    "NaN weights": (["model.kwargs={poison: true}"], ["`2.weight`", "NaN"]),
    "no numbers": (
        ["model.factory=mine_for_kronoscope:empty"],
        ["/model the model's tensor `0.weight` stands on the meta"],
    ),
    "no examples": (["data.kwargs={examples: 0}"], ["/data", "no example"]),
    "inputs of another width": (["data.kwargs={width: 5}"], ["/data", "5"]),
    "labels out of range": (["data.kwargs={top: 4}"], ["/data", "classes 0 to 2"]),
    "a factory that raises": (["data.factory=mine_for_kronoscope:explodes"], ["/data/factory", "no such file of mine"]),
    "a factory that is not there": (["model.factory=mine_for_kronoscope:absent"], ["/model/factory", "`absent`"]),
    "data that change": (
        ["data.factory=mine_for_kronoscope:anew", "collection.ekfac=true"],
        ["/data", "must be the same at every pass: 40 examples with the digest ", "the correction"],
    ),
    "an upload": (["model={source: upload, id: x}"], ["/model/id", "is an upload of a service"]),
    "a folder that is not there": (["model={source: directory, path: nowhere}"], ["/model/path", "does not exist"]),
    "a document with NaN": (["stabilisation.damping=.nan"], ["/stabilisation/damping is not a finite number"]),
}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence_per_fault_and_leaves_nothing(folder: Path, kronoscope: Run, what: str) -> None:
    changes, said = BAD[what]
    done = kronoscope("run", "job.yaml", "--output", "out", *settings(changes))
    assert done.returncode == 2, done.stderr
    for part in said:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr
    assert done.stdout == ""
    assert not (folder / "out").exists()


def test_a_pickle_under_another_name_is_not_read(folder: Path, kronoscope: Run) -> None:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "bert"}')
    (model / "model.safetensors").write_bytes(b"\x80\x04\x95" + b"x" * 64)
    done = kronoscope("run", "job.yaml", "-o", "out", *settings(["model={source: directory, path: model}"]), *settings(
        ["task.type=sequence_classification"]))  # fmt: skip
    assert done.returncode == 2
    assert "is a pickle, not safetensors" in done.stderr


def test_an_output_folder_that_is_not_ours_is_left_alone(folder: Path, kronoscope: Run) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "results.json").write_text("precious")
    done = kronoscope("run", "job.yaml", "--output", "out")
    assert done.returncode == 2
    assert "no run of Kronoscope wrote" in done.stderr
    assert (folder / "out" / "results.json").read_text() == "precious"


@pytest.mark.part(of=2, law="a run leaves what it promises")
def test_the_results_of_an_earlier_run_are_not_replaced_silently(folder: Path, kronoscope: Run) -> None:
    refused_before = kronoscope("run", "job.yaml", "--output", "out", "--set", "data.kwargs={width: 5}")
    assert refused_before.returncode == 2  # and leaves nothing that a second run would replace
    assert kronoscope("run", "job.yaml", "--output", "out").returncode == 0
    first = (folder / "out" / "job.json").read_text()
    refused = kronoscope("run", "job.yaml", "--output", "out")
    assert refused.returncode == 2
    assert "holds the results of an earlier run; give another folder, or --force" in refused.stderr
    assert (folder / "out" / "job.json").read_text() == first
    assert kronoscope("run", "job.yaml", "--output", "out", "--force").returncode == 0
    assert (folder / "out" / "job.json").read_text() != first


@pytest.mark.real_programs
@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.part(of=2, law="a run leaves what it promises")
def test_however_a_run_ends_nothing_runs_on(folder: Path, number: signal.Signals) -> None:
    os.mkfifo(folder / "pid")
    changes = ["data.factory=mine_for_kronoscope:endless", f"data.kwargs={{path: {folder / 'pid'}}}"]
    with subprocess.Popen(
        [*KRONOSCOPE, "run", "job.yaml", "--output", "out", *settings(changes)],
        cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    ) as running:  # fmt: skip
        told: list[int] = []
        # a pipe with a name: reading it waits until the child has begun its pass
        reader = threading.Thread(target=lambda: told.append(int((folder / "pid").read_text())), daemon=True)
        reader.start()
        reader.join(timeout=300)
        assert told, "the child never began"
        child = os.pidfd_open(told[0])
        running.send_signal(number)
        _, said = running.communicate(timeout=300)
        # SIGKILL leaves the command no time to wait for it; its end is the lifeline's work
        assert _gone(child)
        os.close(child)
    assert running.returncode == (5 if number != signal.SIGKILL else -9)
    if number != signal.SIGKILL:
        assert b"stopped; nothing runs on" in said
        assert json.loads((folder / "out" / "job.json").read_text())["state"] == "cancelled"


def _gone(child: int) -> bool:
    """Wait for a process that is not ours to end: its descriptor becomes format_bytes."""
    import select  # noqa: PLC0415 - only here

    return bool(select.select([child], [], [], 300)[0])


def test_the_menu_and_the_exit_codes_are_told(kronoscope: Run) -> None:
    listed = json.loads(kronoscope("menu", "--json").stdout)
    assert [entry["kind"] for entry in listed] == list(ANALYSES)
    help_text = kronoscope("run", "--help").stdout
    for said in ("0 done", "2 wrong input", "3 service", "4 an operator", "5 stopped"):
        assert said in " ".join(help_text.split())
    assert kronoscope("run").returncode == 2
    nobody = kronoscope("submit", "job.yaml", "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 3
    assert "nothing answers at http://127.0.0.1:9" in nobody.stderr


@pytest.mark.part(of=2, law="a run leaves what it promises")
def test_stabilised_factors_are_read_as_factors_and_as_inverses(folder: Path, kronoscope: Run) -> None:
    both = ("--set", "kind=[factors, reconstruction]", "--set", "stabilisation.kappa_max=50")
    done = kronoscope("run", "job.yaml", "--output", "out", *both)
    assert done.returncode == 0, done.stderr
    assert "eigenvalues clipped at κ_max 50" in done.stdout
    basis = ("--set", "kind=reconstruction", "--set", "reconstruction.route=eigenbasis")
    assert kronoscope("run", "job.yaml", "--output", "bases", *both[2:], *basis).returncode == 0
    before, after = load_factors(folder / "out"), load_factors(folder / "out/artifacts/stabilised", verify=True)
    inverses = load_stabilised(folder / "bases")
    assert list(inverses) == list(before) == ["0", "2"]
    for layer, factors in before.items():
        stabilised = []
        for matrix in (factors.A, factors.G):
            values, vectors = torch.linalg.eigh(matrix)
            stabilised.append((vectors * values.clamp_min(float(values[-1]) / 50)) @ vectors.T)
        a, g = stabilised
        torch.testing.assert_close(after[layer].A, a, rtol=0, atol=1e-12 * float(a.max()))
        torch.testing.assert_close(after[layer].G, g, rtol=0, atol=1e-12 * float(g.max()))
        gradient = torch.ones(g.shape[0], a.shape[0], dtype=torch.float64)
        truth = torch.linalg.solve(g, torch.linalg.solve(a, gradient.T).T)
        torch.testing.assert_close(inverses[layer].solve(gradient), truth, rtol=1e-8, atol=1e-10)
    # an earlier run's stabilised factors, taken by a later one: nothing is left to clip
    (folder / "again.yaml").write_text(
        "kind: [capacity, reconstruction]\nfactors: {path: out/artifacts/stabilised}\n"
        "stabilisation: {kappa_max: 50.1}\n"
    )
    again = kronoscope("run", "again.yaml", "--output", "again", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["summary"]["reconstruction"]["clipped"] == 0


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("storage", ["null", "float16"])
def test_matrices_among_gradient_rows_are_inverted_through(folder: Path, kronoscope: Run, storage: str) -> None:
    """A side of rows is never made dense, so its layer lies as a matrix and an eigenbasis: one reader has both."""
    told = ("--set", "stabilisation.kappa_max=50", "--set", f"collection.storage_dtype={storage}")
    kinds = ("--set", "kind=[factors, reconstruction]", "--set", "woodbury.policy=all")
    done = kronoscope("run", "job.yaml", "--output", "out", *kinds, *told)
    assert done.returncode == 0, done.stderr
    with pytest.raises(BrokenFactors, match="read it by `load_stabilised`"):
        load_factors(folder / "out/artifacts/stabilised")
    inverses = load_stabilised(folder / "out")
    for layer, factors in load_factors(folder / "out").items():
        stabilised = []
        for matrix in (factors.A.double(), factors.G.double()):
            values, vectors = torch.linalg.eigh(matrix)
            stabilised.append((vectors * values.clamp_min(float(values[-1]) / 50)) @ vectors.T)
        a, g = stabilised
        gradient = torch.ones(g.shape[0], a.shape[0], dtype=torch.float64)
        truth = torch.linalg.solve(g, torch.linalg.solve(a, gradient.T).T)
        near = 1e-6 if storage == "null" else 0.05
        torch.testing.assert_close(
            inverses[layer].solve(gradient), truth, rtol=near, atol=near * float(truth.abs().max())
        )


def test_a_side_that_was_not_asked_for_is_said_to_be_missing(folder: Path, kronoscope: Run) -> None:
    told = (
        "--set",
        "kind=reconstruction",
        "--set",
        "reconstruction.sides=G",
        "--set",
        "reconstruction.route=eigenbasis",
    )
    assert kronoscope("run", "job.yaml", "--output", "out", *told).returncode == 0
    with pytest.raises(BrokenFactors, match="its A was not stabilised"):
        load_stabilised(folder / "out")["0"]
