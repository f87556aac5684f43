import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load

from catalog.analyses.capacity import CapacityMetrics, CapacitySummary
from catalog.analyses.compare_curvature import CompareCurvatureMetrics, CompareCurvatureSummary
from catalog.frames import Failed
from catalog.responses.layer_record import LayerRecord
from kronoscope import Client
from kronoscope.cli.documents import read_document
from kronoscope.cli.finished_jobs import _in_options
from kronoscope.cli.serve import FactoryWrong, require_factories
from kronoscope.client import ClientError
from kronoscope.local import load_factors
from tests.api.server import held_port
from tests.kronoscope.conftest import FACTORIES, JOB, KRONOSCOPE, environment, settings

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    """``kronoscope serve --embedded`` as a process; ended by ctrl-C."""
    (home / "mine_for_kronoscope.py").write_text(FACTORIES)
    listed = [f"--allow-factory=mine_for_kronoscope:{name}" for name in ("model", "data", "anew", "endless")]
    with held_port() as port, subprocess.Popen(
        [*KRONOSCOPE, "serve", "--embedded", "--port", str(port), "--data-dir", "data", *listed],
        cwd=home, env=environment(), stderr=subprocess.PIPE, text=True,
    ) as serving:  # fmt: skip
        assert serving.stderr is not None
        said = []
        for line in serving.stderr:
            said.append(line)
            if line.startswith("ready:"):
                break
        assert said, "it never came up"
        assert said[-1].startswith("ready:"), "".join(said)
        assert said[1:4] == [
            f"folder: {home / 'data'}\n",
            f"port: {port}, on this machine alone (127.0.0.1)\n",
            f"devices: {_devices(port)}\n",
        ]
        yield f"http://127.0.0.1:{port}"
        serving.send_signal(signal.SIGINT)
        serving.communicate(timeout=300)
    assert serving.returncode == 0
    assert oct((home / "data").stat().st_mode)[-3:] == "700"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def _devices(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/devices", timeout=60) as answer:
        listed = json.load(answer)["items"]
    assert listed
    return "; ".join(f"{each['name']}, {each['capacity_bytes'] / 2**30:,.1f} GiB" for each in listed)


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def methods(kronoscope: Run, url: str, *options: str) -> tuple[str, str]:
    """The id of a real job, and the text for a paper on one line."""
    done = kronoscope("submit", "job.yaml", "--wait", "--json", "--url", url, *settings(options))
    assert done.returncode == 0, done.stderr
    job_id = json.loads(done.stdout)["id"]
    said = kronoscope("results", job_id, "--methods", "--url", url)
    assert said.returncode == 0, said.stderr
    return job_id, said.stdout


@pytest.mark.part(of=2, law="a job goes through a service of one process")
def test_results_come_with_the_text_for_a_paper(kronoscope: Run, client: Client, url: str) -> None:
    job_id, said = methods(kronoscope, url)
    manifest = client.results(job_id).manifest
    assert manifest is not None
    # what the bytes of the factory's own model and data give, however they were read
    assert (len(manifest["model_sha256"]), len(manifest["data_sha256"]), manifest["examples"]) == (64, 64, 40)
    for part in (
        "K-FAC (Martens & Grosse, 2015) of the Fisher information, with 1 label sampled from the model",
        "40 examples, 40 loss terms entered a plain average, in batches of 16, with seed 0",
        "Passes and sums were in float64.",
        "λ = 0.0001 times the mean eigenvalue of the layer's block, split between A and G by the factor π",
        "All 83 trainable parameters",
        f"SHA-256 of the model {manifest['model_sha256']}; the data {manifest['data_sha256']}; the job document ",
        f"with Kronoscope {manifest['environment']['packages']['kronoscope']}",
        f"torch {manifest['environment']['packages']['torch']}",
        "martens2015kfac",
    ):
        assert part in said, said
    assert "george2018ekfac" not in said
    assert "eschenhagen2023kfac" not in said

    again, other = methods(
        kronoscope, url, "kind=factors", "collection.fisher=type2", "collection.ekfac=true",
        "collection.sharing=reduce", "collection.seed=3",
    )  # fmt: skip
    assert "in closed form, which is the generalised Gauss-Newton matrix" in other
    assert "K-FAC-reduce (Eschenhagen et al., 2023)" in other
    assert "EK-FAC; George et al., 2018" in other
    assert {"george2018ekfac", "eschenhagen2023kfac"} <= {line[15:-1] for line in other.splitlines() if line[:1] == "@"}
    assert "The damping" not in other
    second = client.results(again).manifest
    assert second is not None
    assert all(second[name] == manifest[name] for name in ("model_sha256", "data_sha256"))


@pytest.mark.part(of=2, law="a job goes through a service of one process")
def test_two_jobs_of_the_service_are_compared(kronoscope: Run, client: Client, url: str, tmp_path: Path) -> None:
    jobs = []
    for seed in (0, 1):
        changes = settings(("kind=factors", f"collection.seed={seed}"))
        done = kronoscope("submit", "job.yaml", "--wait", "--json", "--url", url, *changes)
        assert done.returncode == 0, done.stderr
        jobs.append(json.loads(done.stdout)["id"])
    document = tmp_path / "compare.yaml"
    document.write_text("kind: compare_curvature\nfactors: {job: a}\ncompare_curvature: {k: [1, 3]}\n")

    def compared(first: str, against: str) -> str:
        named = settings((f"factors.job={first}", f"compare_curvature.against.job={against}"))
        done = kronoscope("submit", str(document), "--wait", "--json", "--url", url, *named)
        assert done.returncode == 0, done.stdout + done.stderr
        job_id: str = json.loads(done.stdout)["id"]
        return job_id

    other, same = compared(*jobs), compared(jobs[0], jobs[0])
    apart, equal = (client.results(each).summary["compare_curvature"] for each in (other, same))
    assert isinstance(apart, CompareCurvatureSummary)
    assert isinstance(equal, CompareCurvatureSummary)
    assert [(each.option, each.first, each.against) for each in apart.differences] == [("seed", "0", "1")]
    assert (equal.distance, equal.divergence, equal.factors_sha256) == (0, 0, apart.factors_sha256)
    assert apart.distance is not None
    assert apart.distance > 0
    assert equal.factors_sha256 == equal.against_sha256 != apart.against_sha256
    rows = list(client.layers(other))
    assert all(isinstance(row.metrics, CompareCurvatureMetrics) for row in rows)
    manifest = client.results(other).manifest
    assert manifest is not None
    assert (manifest["factors_sha256"], manifest["against_sha256"]) == (apart.factors_sha256, apart.against_sha256)
    shown = kronoscope("results", other, "--url", url)
    assert "compare_curvature: 2 layers" in shown.stdout
    assert "k=1" in shown.stdout
    assert "collected with seed 0 against 1" in shown.stdout.replace("\n", " ")
    said = kronoscope("results", other, "--methods", "--url", url).stdout
    assert f"They were compared with the factors stored in job {jobs[1]}." in said
    refused = kronoscope("submit", str(document), "--url", url, *settings((f"factors.job={jobs[0]}",)))
    assert refused.returncode == 2
    assert "/compare_curvature/against" in refused.stderr


@pytest.mark.part(of=2, law="a job goes through a service of one process")
def test_a_job_goes_through_the_service_and_comes_back_typed(
    folder: Path, kronoscope: Run, client: Client, url: str
) -> None:
    done = kronoscope("submit", "job.yaml", "--wait", "--set", "labels.note=first", "--url", url)
    assert done.returncode == 0, done.stderr
    assert "capacity: 2 layers" in done.stdout
    # what the stages took beside their plan comes with the job's files
    assert "stages: planned, measured, error" in done.stdout
    (job,) = client.jobs(label="note=first")
    assert job.state == "succeeded"
    results = client.results(job.id)
    assert isinstance(results.summary["capacity"], CapacitySummary)
    assert results.summary["capacity"].coverage.covered_share == 1
    rows = list(client.layers(job.id, kind="capacity"))
    assert [row.layer for row in rows] == ["0", "2"]
    assert isinstance(rows[0].metrics, CapacityMetrics)
    assert isinstance(rows[0].record, LayerRecord)
    assert len(client.log(job.id).splitlines()) == 4
    shown = kronoscope("results", job.id, "--json", "--download", "files", "--url", url)
    assert shown.returncode == 0, shown.stderr
    assert len(json.loads(shown.stdout)["layers"]) == 4
    refused = kronoscope("results", job.id, "--download", "job.yaml", "--url", url)
    assert refused.returncode == 2
    assert "must be a folder (got 'job.yaml')" in refused.stderr
    factors = load_factors(folder / "files", verify=True)
    assert list(factors) == ["0", "2"]
    assert factors["2"].G.shape == (3, 3)


def test_the_same_key_gives_the_same_job(folder: Path, client: Client) -> None:
    document = read_document(folder / "job.yaml", ["labels.note=twice"])
    first, second = (client.submit(document, idempotency_key="one-and-the-same") for _ in range(2))
    assert first.id == second.id
    with pytest.raises(ClientError) as refused:
        client.submit({**document, "kind": "capacity"}, idempotency_key="one-and-the-same")
    assert refused.value.status in (409, 422)


def test_an_estimate_says_what_the_job_would_take_and_makes_none(kronoscope: Run, client: Client, url: str) -> None:
    before = [job.id for job in client.jobs()]
    shown = kronoscope("plan", "job.yaml", "--budget", "1MiB", "--url", url)
    assert shown.returncode == 0, shown.stderr
    for said in (
        "collection",
        "does not fit into 1 MiB",
        "the smallest budget that would do",
        "assumed, as no weight",
    ):
        assert said in shown.stdout
    assert [job.id for job in client.jobs()] == before


def test_an_estimate_of_what_does_not_belong_together_names_the_field(folder: Path, client: Client) -> None:
    changes = ["model={source: builtin, name: tiny_gpt}", "data={source: builtin, name: digits}"]
    with pytest.raises(ClientError) as refused:
        client.estimate(read_document(folder / "job.yaml", changes))
    assert refused.value.status == 422
    (fault,) = refused.value.complaints
    assert fault.pointer == "/data/name"


def test_faults_are_the_services_own_sentences(folder: Path, kronoscope: Run, client: Client, url: str) -> None:
    changes = settings(["collection.batch_size=-1", "labels.note=bad"])
    for more in ([], ["--validate-only"]):
        done = kronoscope("submit", "job.yaml", *changes, *more, "--url", url)
        assert done.returncode == 2
        assert "error: /collection/batch_size is -1; take 1 to 65536" in done.stderr
        assert "Traceback" not in done.stderr
    assert kronoscope("results", "no-such-job", "--url", url).returncode == 2
    assert list(client.jobs(label="note=bad")) == []


def test_a_job_that_fails_gives_the_commands_exit_code(kronoscope: Run, url: str) -> None:
    done = kronoscope("submit", "job.yaml", "--wait", *settings(["model.kwargs={poison: true}"]), "--url", url)
    assert done.returncode == 2, done.stderr
    assert "`2.weight`" in done.stderr


def test_data_that_change_between_passes_end_the_job_with_both_figures(
    folder: Path, kronoscope: Run, client: Client, url: str
) -> None:
    document = ["data.factory=mine_for_kronoscope:anew", "kind=[natural_gradient]"]
    job_id = kronoscope("submit", "job.yaml", *settings(document), "--url", url).stdout.strip()
    assert kronoscope("watch", job_id, "--url", url).returncode == 2
    failure = client.job(job_id).failure
    assert failure is not None
    assert (failure.category, failure.code, failure.pointer) == ("usage", "data_differ", "/data")
    assert failure.message.count("40 examples with the digest ") == 2


def test_a_running_job_is_cancelled(folder: Path, kronoscope: Run, client: Client, url: str) -> None:
    os.mkfifo(folder / "pid")
    changes = ["data.factory=mine_for_kronoscope:endless", f"data.kwargs={{path: {folder / 'pid'}}}"]
    submitted = kronoscope("submit", "job.yaml", *settings(changes), "--url", url)
    job_id = submitted.stdout.strip()
    assert int((folder / "pid").read_text())  # the child has begun
    assert kronoscope("cancel", job_id, "--url", url).returncode == 0
    watched = kronoscope("watch", job_id, "--url", url)
    assert watched.returncode == 5, watched.stderr
    assert "cancelled" in watched.stderr
    assert client.job(job_id).state == "cancelled"


def test_a_taken_port_is_said(url: str, kronoscope: Run) -> None:
    done = kronoscope("serve", "--embedded", "--port", url.rpartition(":")[2])
    assert done.returncode == 3
    assert "give another with --port" in done.stderr


def test_a_second_service_on_the_folder_is_refused_with_the_address_of_the_first(
    home: Path, url: str, kronoscope: Run
) -> None:
    done = kronoscope("serve", "--embedded", "--data-dir", str(home / "data"))
    assert done.returncode == 3
    assert f"{home / 'data'} is in use by the service at {url} (process " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("mine_for_kronoscope", "is 'mine_for_kronoscope'; write `package.module:callable`"),
        ("local=mine_for_kronoscope.model", "is 'local=mine_for_kronoscope.model'; write"),
        ("mine:model", "is 'mine:model', and there is no module 'mine' in "),
        ("json.no_such:load", "is 'json.no_such:load', and there is no module 'json.no_such' in "),
        ("mine_for_kronoscope:model,json:", "is 'json:'; write"),
    ],
)
def test_a_factory_that_no_job_could_name_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: str, said: str
) -> None:
    monkeypatch.chdir(folder)
    good = ["*", "json:loads", "json.decoder:x", "sys:exit", "local=math:pi", "mine_for_kronoscope:model"]
    require_factories(good, importable=True)
    with pytest.raises(FactoryWrong) as refused:
        require_factories([*good, given], importable=True)
    assert f"--allow-factory {said}" in str(refused.value)
    if "no module" in said:
        require_factories([given], importable=False)


def test_a_package_that_is_installed_to_be_edited_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finder stands among Python's own, and no folder of it is searched."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, folder / "mine_for_kronoscope.py") if name == "edited" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    require_factories(["edited:model"], importable=True)
    with pytest.raises(FactoryWrong):
        require_factories(["edited.below:model"], importable=True)


def test_a_wrong_factory_is_refused_before_anything_starts(folder: Path, kronoscope: Run) -> None:
    done = kronoscope("serve", "--embedded", "--data-dir", "data", "--allow-factory", "mine:model")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --allow-factory is 'mine:model', and there is no module 'mine' in ")
    assert not (folder / "data").exists()


assert JOB  # written into every test's folder


def test_an_unlisted_factory_or_folder_is_refused(folder: Path, kronoscope: Run, url: str) -> None:
    for change, pointer in (
        ('model={source: factory, factory: "os:getcwd"}', "/model/factory"),
        ("model={source: directory, path: /etc}", "/model/path"),
    ):
        done = kronoscope("submit", "job.yaml", "--set", change, "--url", url)
        assert done.returncode == 2
        assert pointer in done.stderr


def test_a_job_is_scheduled_from_the_command_line(folder: Path, kronoscope: Run, client: Client, url: str) -> None:
    def submit(*options: str) -> subprocess.CompletedProcess[str]:
        slow = ("--set", "model={source: factory, factory: 'mine_for_kronoscope:endless'}")
        return kronoscope("submit", "job.yaml", *slow, "--url", url, *options)

    done = submit("--set", "schedule.deadline=2020-01-01T00:00Z", "--priority", "-4", "--within", "2h")
    assert done.returncode == 0, done.stderr
    job = client.job(done.stdout.strip())
    assert job.priority == -4
    assert job.created_at is not None
    assert job.deadline_at is not None
    left = datetime.fromisoformat(job.deadline_at) - datetime.fromisoformat(job.created_at)
    assert abs(left.total_seconds() - 7200) < 600
    assert client.reschedule(job.id, {"priority": 2}).deadline_at is None
    client.cancel(job.id)
    late = submit("--deadline", "2020-01-01T00:00Z")
    assert (late.returncode, late.stdout) == (2, "")
    assert "/schedule/deadline has passed" in late.stderr


@pytest.mark.part(of=2, law="a job goes through a service of one process")
def test_factors_go_to_another_tool_from_a_job_as_from_a_folder(
    kronoscope: Run, client: Client, url: str, folder: Path
) -> None:
    done = kronoscope("submit", "job.yaml", "--wait", "--json", "--url", url, *settings(["keep=[factors]"]))
    assert done.returncode == 0, done.stderr
    job_id = json.loads(done.stdout)["id"]
    of_job = kronoscope("export", job_id, "--to", "corda", "--output", "job.pt", "--url", url)
    assert of_job.returncode == 0, of_job.stderr
    assert of_job.stdout == "corda in job.pt\n"
    assert kronoscope("run", "job.yaml", "--output", "out", *settings(["keep=[factors]"])).returncode == 0
    of_folder = kronoscope("export", "out", "--to", "corda", "--output", "folder.pt")
    assert of_folder.returncode == 0, of_folder.stderr
    assert (folder / "job.pt").read_bytes() == (folder / "folder.pt").read_bytes()
    zipped = kronoscope("export", "out", "--to", "kronfluence", "--output", "factors_mine")
    assert zipped.returncode == 0, zipped.stderr
    assert len(list((folder / "factors_mine").iterdir())) == 5

    # the same by REST: the file is there once the job that POST names has ended
    place = f"{url}/v1/jobs/{job_id}/exports/gptq"
    with httpx.Client(trust_env=False, timeout=300) as plain:
        assert plain.get(place).status_code == 404
        first = plain.post(place)
        assert first.status_code == 202, first.text
        *_, ended = client.follow(first.json()["id"])
        assert (ended.state, ended.kinds) == ("succeeded", ("export",))
        assert plain.post(place).json()["id"] == ended.id
        whole = plain.get(place)
        assert (whole.status_code, whole.headers["content-type"]) == (200, "application/vnd.safetensors")
        part = plain.get(place, headers={"range": "bytes=0-7"})
        assert (part.status_code, part.content) == (206, whole.content[:8])
    tensors = load(whole.content)
    factors = load_factors(folder / "out")
    for name, layer in factors.items():
        kept = layer.A[:-1, :-1] if layer._facts.bias else layer.A
        assert torch.equal(tensors[f"{name}.hessian"], 2 * kept)


@pytest.mark.part(of=2, law="a job goes through a service of one process")
def test_an_export_that_cannot_be_says_why_and_leaves_nothing(kronoscope: Run, folder: Path) -> None:
    assert kronoscope("run", "job.yaml", "--output", "out", *settings(["keep=[factors]"])).returncode == 0
    # what was killed has left one folder, and another export is at work in the other
    for name in ("killed", "at-work"):
        (folder / f".part-export-{name}").mkdir()
    at_work = os.open(folder / ".part-export-at-work", os.O_RDONLY)
    fcntl.flock(at_work, fcntl.LOCK_EX)
    for words, said in (
        (("--to", "onnx", "--output", "x"), "must be one of gptq, corda, laplace, kronfluence, mom2"),
        (("--to", "laplace", "--output", "x"), "`laplace` needs classification or regression"),
        (
            ("--to", "gptq", "--without", "absent", "--output", "x"),
            "`--without` holds 'absent', which is the name of no",
        ),
        (
            ("--to", "gptq", "--set", "stabilisation.kappa_max=null", "--output", "x"),
            "`stabilisation.kappa_max` is null",
        ),
        (("--to", "gptq", "--output", "out"), "out is a folder; name a file in it"),
        (("--to", "gptq", "--set", "export.format=corda", "--output", "x"), "--set changes `kind`, `factors`"),
        (("--to", "gptq", "--set", "export=null", "--output", "x"), "--set changes `kind`, `factors`"),
        (("--to", "gptq", "--output", "job.yaml/x"), "name a file in a folder that you may write"),
        (("--to", "mom2", "--output", "out"), "out exists and is not an empty folder"),
    ):
        done = kronoscope("export", "out", *words)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr.replace("\n", " "), done.stderr
        assert not (folder / "x").exists()
    assert [each.name for each in folder.glob(".part-*")] == [".part-export-at-work"]
    os.close(at_work)
    message = 'leave these out by name: `export.without: ["a", "b"]`; or give `export.outputs`'
    failure = Failed(category="usage", code="c", message=message, pointer="/export/without", layer="a", detail=None)
    said = _in_options(failure)
    assert said.pointer == "--without"
    assert said.message == 'leave these out by name: `--without "a" --without "b"`; or give `--outputs`'
    assert kronoscope("export", "nowhere/at-all", "--to", "gptq", "--output", "x").returncode == 2
