"""A job is computed again from its own record, and what differs is named: where first, by how much, and for what."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from kronoscope import Client
from tests.api.server import held_port
from tests.kronoscope.conftest import KRONOSCOPE, environment

Run = Callable[..., subprocess.CompletedProcess[str]]

MODULE = """
import torch
from safetensors.torch import load_file


def model(path):
    made = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(),
                               torch.nn.Linear(8, 3))
    made.load_state_dict(load_file(path))
    return made
"""
JOB = """\
kind: [factors, capacity]
model: {source: factory, factory: "stored_for_kronoscope:model", kwargs: {path: HERE/weights.safetensors}}
data: {source: file, path: HERE/data.safetensors}
task: {type: classification}
collection: {batch_size: 16}
stabilisation: {damping: 1e-4}
keep: [factors, spectra]
"""


def write_inputs(folder: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    (folder / "stored_for_kronoscope.py").write_text(MODULE)
    (folder / "stored.yaml").write_text(JOB.replace("HERE", str(folder)))
    sizes = {"0.weight": (8, 6), "0.bias": (8,), "2.weight": (8, 8), "2.bias": (8,), "4.weight": (3, 8), "4.bias": (3,)}
    weights = {name: torch.randn(size, generator=generator) / 2 for name, size in sizes.items()}
    save_file(weights, folder / "weights.safetensors")
    data = {"inputs": torch.randn(40, 6, generator=generator), "targets": torch.arange(40) % 3}
    save_file(data, folder / "data.safetensors")


def flip_bit(folder: Path) -> None:
    """Flip one bit of one weight of the second layer; the lowest would be lost in the rounding of its sums."""
    weights = load_file(folder / "weights.safetensors")
    weights["2.weight"].view(torch.int32)[3, 5] ^= 1 << 16
    save_file(weights, folder / "weights.safetensors")


def exchange_examples(folder: Path) -> None:
    """Exchange the first example with one of another batch."""
    data = load_file(folder / "data.safetensors")
    order = torch.arange(40)
    order[0], order[37] = 37, 0
    save_file({name: values[order].contiguous() for name, values in data.items()}, folder / "data.safetensors")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, beside the files of its model and data."""
    folder = tmp_path_factory.mktemp("original")
    write_inputs(folder)
    done = subprocess.run(
        [*KRONOSCOPE, "run", "stored.yaml", "--output", "first"],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def inputs(original: Path) -> Iterator[Path]:
    """The same folder, whose model and data may be changed until the test ends."""
    before = {name: (original / name).read_bytes() for name in ("weights.safetensors", "data.safetensors")}
    yield original
    for name, content in before.items():
        (original / name).write_bytes(content)


def command(
    first: Path, output: Path, *options: str, home: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Reproduce a run in the folder that its factory lies in."""
    home = home or Path(json.loads((first / "job.json").read_text())["document"]["data"]["path"]).parent
    return subprocess.run(
        [*KRONOSCOPE, "reproduce", str(first), "--output", str(output), *options],
        cwd=home, env=environment(**more), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def said_equal(first: Path | str, files: list[str]) -> str:
    assert len(files) > 6
    counted = len([each for each in files if not each.endswith(("memory_curve.json", "factors.index.json"))])
    return f"equal to {first}: 6 rows with digests and metrics, the summaries and the files (in all: {counted})"


def reproduced(first: Path, output: Path, code: int) -> dict[str, Any]:
    done = command(first, output, "--json")
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows_of(output: Path) -> dict[tuple[str, str], dict[str, Any]]:
    layers = json.loads((output / "results.json").read_text())["layers"]
    return {(row["kind"], row["layer"]): row for row in layers}


def require_first(found: dict[str, Any], first: Path, again: Path) -> None:
    """Hold what is said of the factors against the digests and traces in the two folders."""
    before, after = rows_of(first), rows_of(again)
    layers = ("0", "2", "4")
    stages = {each["stage"]: each for each in found["differences"]}
    for side in "AG":
        factors = [(before["factors", layer], after["factors", layer]) for layer in layers]
        differ = [then["record"][f"digest_{side}"] != now["record"][f"digest_{side}"] for then, now in factors]
        traces = [(then["metrics"][f"trace_{side}"], now["metrics"][f"trace_{side}"]) for then, now in factors]
        said = stages.get(f"factor {side}")
        assert (said is None) == (not any(differ))
        if said is not None:
            assert (said["layer"], said["count"]) == (layers[differ.index(True)], sum(differ))
            assert said["field"] == f"digest_{side}"
            largest = max(abs(a - b) / max(a, b) for a, b in traces)
            assert said["largest"] == (pytest.approx(largest, rel=1e-12) if largest else None)


@pytest.mark.part(of=3, law="a run is computed again")
def test_an_unchanged_run_is_equal_and_the_original_stays_as_it_is(original: Path, tmp_path: Path) -> None:
    first = original / "first"
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    files = [each["name"] for each in json.loads(before[first / "job.json"])["artifacts"]]
    found = reproduced(original / "first", tmp_path / "again", code=0)
    assert found == {
        "job": str(tmp_path / "again"), "of": str(first), "equal": True, "rows": 6, "differences": [],
        "circumstances": [],
        "sentences": [said_equal(first, files)],
    }  # fmt: skip
    assert rows_of(first).keys() == rows_of(tmp_path / "again").keys()
    job = json.loads((tmp_path / "again" / "job.json").read_text())
    assert job["document"]["reproduces"] == str(first)  # the lineage
    assert job["reproduction"]["equal"] is True
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    # and a reproduction is reproduced as any other run
    (tmp_path / "first").symlink_to(tmp_path / "again")
    assert reproduced(tmp_path / "first", tmp_path / "third", code=0)["of"] == str(tmp_path / "first")


FEWSHOT = {
    "kind": "fewshot_training",
    "data": {"source": "strokes", "image_size": 16, "channels": 1},
    "fewshot_training": {
        "backbone": "Conv4", "width": 4, "n_way": 3, "k_shot": 2, "n_query": 3, "num_epoch": 1, "n_episode": 5,
        "test_iter": 3,
    },
}  # fmt: skip


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize(
    "options",
    [["kind=[spectrum, natural_gradient, sensitivity]", "collection.ekfac=true"], ["shards=2"], FEWSHOT],
    ids=["every pass", "divided", "training"],
)
@pytest.mark.part(of=3, law="a run is computed again")
def test_other_ways_to_compute_are_equal_too(original: Path, tmp_path: Path, options: Any) -> None:
    document, changes = original / "stored.yaml", [part for each in options for part in ("--set", each)]
    if options is FEWSHOT:
        document, changes = tmp_path / "fewshot.json", []
        document.write_text(json.dumps(FEWSHOT))
    first = tmp_path / "first"
    done = subprocess.run(
        [*KRONOSCOPE, "run", str(document), "--output", str(first), *changes],
        cwd=original, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = command(first, tmp_path / "again", "--json", home=original)
    assert found.returncode == 0, found.stdout + found.stderr
    assert json.loads(found.stdout)["rows"] == len(rows_of(first)) > 0


@pytest.mark.part(of=3, law="a run is computed again")
def test_nothing_of_the_original_is_read_but_its_record(original: Path, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    for name in ("job.json", "results.json"):
        (tmp_path / "first" / name).write_bytes((original / "first" / name).read_bytes())
    found = reproduced(tmp_path / "first", tmp_path / "again", code=0)
    assert found["equal"] is True
    # a row of the record that is changed shows, by its number
    results = json.loads((tmp_path / "first" / "results.json").read_text())
    results["layers"][4]["metrics"]["effective_rank"] *= 1.25
    results["layers"][4]["sha256"] = None
    (tmp_path / "first" / "results.json").write_text(json.dumps(results))
    changed = reproduced(tmp_path / "first", tmp_path / "third", code=4)
    (only,) = changed["differences"]
    assert (only["stage"], only["analysis"], only["layer"], only["field"]) == (
        "metrics", "capacity", "2", "effective_rank",
    )  # fmt: skip
    assert only["largest"] == pytest.approx(0.2)
    # so does one that is missing
    del results["layers"][2]
    (tmp_path / "first" / "results.json").write_text(json.dumps(results))
    lacking = reproduced(tmp_path / "first", tmp_path / "fourth", code=4)
    assert lacking["sentences"][-1] == "no recorded circumstance differs"
    lacking = lacking["differences"]
    assert (lacking[0]["stage"], lacking[0]["layer"], lacking[0]["analysis"]) == ("layers", "4", "factors")


@pytest.mark.part(of=3, law="a run is computed again")
def test_one_bit_of_one_weight_is_named(inputs: Path, tmp_path: Path) -> None:
    flip_bit(inputs)
    found = reproduced(inputs / "first", tmp_path / "again", code=4)
    jobs = [json.loads((each / "job.json").read_text()) for each in (inputs / "first", tmp_path / "again")]
    then, now = (job["model_sha256"] for job in jobs)
    assert then != now
    assert found["circumstances"] == [f"model_sha256: {then} then, {now} now"]
    # inputs of the layers up to the changed one are the same to the bit, what follows is not
    assert (found["differences"][0]["stage"], found["differences"][0]["layer"]) == ("factor A", "4")
    require_first(found, inputs / "first", tmp_path / "again")


@pytest.mark.part(of=3, law="a run is computed again")
def test_two_examples_that_are_exchanged_are_named(inputs: Path, tmp_path: Path) -> None:
    exchange_examples(inputs)
    found = reproduced(inputs / "first", tmp_path / "again", code=4)
    jobs = [json.loads((each / "job.json").read_text()) for each in (inputs / "first", tmp_path / "again")]
    then, now = (job["data_sha256"] for job in jobs)
    assert then != now
    assert found["circumstances"] == [f"data_sha256: {then} then, {now} now"]
    require_first(found, inputs / "first", tmp_path / "again")


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        (["--threads", "2"], {}, ["threads: 1 then, 2 now"]),
        pytest.param(
            [],
            {"ATEN_CPU_CAPABILITY": "default"},
            ["cpu_capability: {} then, DEFAULT now"],
            marks=pytest.mark.real_programs,  # torch reads the variable as it is imported
        ),
    ],
)
@pytest.mark.part(of=3, law="a run is computed again")
def test_other_numerics_are_named(
    original: Path, tmp_path: Path, options: list[str], variables: dict[str, str], said: list[str]
) -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    first, again = original / "first", tmp_path / "again"
    done = command(first, again, "--json", *options, **variables)
    found = json.loads(done.stdout)
    assert found["circumstances"] == [each.format(capability) for each in said]
    assert done.returncode == (0 if found["equal"] else 4)
    require_first(found, first, again)
    digests = [[row["record"]["digest_A"] for row in rows_of(each).values()] for each in (first, again)]
    if found["equal"]:
        assert digests[0] == digests[1]


@pytest.mark.part(of=3, law="a run is computed again")
def test_another_version_is_named_whether_numbers_differ_or_not(original: Path, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    for name in ("job.json", "results.json"):
        (tmp_path / "first" / name).write_bytes((original / "first" / name).read_bytes())
    job = json.loads((tmp_path / "first" / "job.json").read_text())
    job["environment"]["packages"]["torch"] = "2.0.1"
    (tmp_path / "first" / "job.json").write_text(json.dumps(job))
    found = reproduced(tmp_path / "first", tmp_path / "again", code=0)
    assert (found["equal"], found["circumstances"]) == (True, [f"torch: 2.0.1 then, {torch.__version__} now"])


@pytest.mark.part(of=3, law="a run is computed again")
def test_the_command_says_it_in_sentences(inputs: Path, kronoscope: Run) -> None:
    flip_bit(inputs)
    done = kronoscope("reproduce", str(inputs / "first"), PYTHONPATH=str(inputs))
    assert done.returncode == 4, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"differs from {inputs / 'first'}: first factor A of layer `4`, `digest_A` (layers: 1, ")
    assert any(line.startswith("model_sha256: ") for line in lines)
    # without --output the new run stands beside the original; its results hold the comparison
    assert lines[-1] == f"the new results are those of {inputs / 'first-reproduced'}"
    shown = kronoscope("results", str(inputs / "first-reproduced"))
    assert lines[0] in shown.stdout


@pytest.mark.parametrize("lost", ["weights.safetensors", "data.safetensors"])
def test_a_model_or_data_that_is_gone_is_named_with_the_digests(inputs: Path, tmp_path: Path, lost: str) -> None:
    (inputs / lost).unlink()
    done = command(inputs / "first", tmp_path / "again")
    assert (done.returncode, done.stdout) == (2, "")
    said = " ".join(done.stderr.split())
    job = json.loads((inputs / "first" / "job.json").read_text())
    assert lost in said
    for name in ("model_sha256", "data_sha256"):
        assert f"{name} {job[name]}" in said
    assert not (tmp_path / "again").exists()


@pytest.mark.part(of=3, law="a run is computed again")
def test_what_is_no_run_that_has_succeeded_is_refused(original: Path, tmp_path: Path, kronoscope: Run) -> None:
    first = tmp_path / "copy"
    first.mkdir()
    job = json.loads((original / "first" / "job.json").read_text())
    (first / "results.json").write_bytes((original / "first" / "results.json").read_bytes())

    def refused(**changes: Any) -> str:
        written = {name: value for name, value in (job | changes).items() if value is not ...}
        (first / "job.json").write_text(json.dumps(written))
        done = kronoscope("reproduce", str(first), "--output", "other")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert not (tmp_path / "other").exists()
        return " ".join(done.stderr.split())

    assert "`reproduces` names a job that is running; only one that has succeeded" in refused(state="running")
    assert "that is failed" in refused(state="failed")
    assert "of an older version, without a manifest" in refused(environment=None)
    assert "of an older version, without a manifest" in refused(model_sha256=...)
    assert "cannot be read as a run" in refused(artifacts=...)
    (first / "job.json").write_text(json.dumps(job))
    changes = ("--set", f"reproduces={first}", "--set", "collection.batch_size=8")
    other = kronoscope("run", str(original / "stored.yaml"), "--output", "other", *changes)
    assert other.returncode == 2
    assert "names a job with another `collection`, whose plan this one cannot follow" in other.stderr
    (first / "results.json").unlink()
    assert "results.json" in refused()
    assert "holds no job.json" in kronoscope("reproduce", str(tmp_path)).stderr
    before = (original / "first" / "results.json").read_bytes()
    same = kronoscope("reproduce", str(original / "first"), "--output", str(original / "first"), "--force")
    assert same.returncode == 2
    assert "stays as it is; give another folder for the output" in same.stderr
    assert (original / "first" / "results.json").read_bytes() == before


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The embedded service, in the folder with the files of a model and of data."""
    home = tmp_path_factory.mktemp("service")
    write_inputs(home)
    listed = ["--allow-factory=stored_for_kronoscope:model", f"--allow-directory={home}"]
    with held_port() as port, subprocess.Popen(
        [*KRONOSCOPE, "serve", "--embedded", "--port", str(port), "--data-dir", "data", *listed],
        cwd=home, env=environment(), stderr=subprocess.PIPE, text=True,
    ) as serving:  # fmt: skip
        assert serving.stderr is not None
        assert any(line.startswith("ready:") for line in serving.stderr), "it never came up"
        yield home, f"http://127.0.0.1:{port}"
        serving.send_signal(signal.SIGINT)
        serving.communicate(timeout=300)


@pytest.mark.part(of=3, law="a run is computed again")
def test_a_job_of_the_service_is_reproduced(service: tuple[Path, str], kronoscope: Run) -> None:
    home, url = service
    done = kronoscope("submit", str(home / "stored.yaml"), "--wait", "--json", "--url", url)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["id"]
    with httpx.Client(base_url=url, trust_env=False, timeout=300) as plain, Client(url) as client:
        before = plain.get(f"/v1/jobs/{first}").json(), plain.get(f"/v1/jobs/{first}/layers").json()
        answer = plain.post(f"/v1/jobs/{first}:reproduce", headers={"idempotency-key": "once"})
        assert answer.status_code == 202, answer.text
        again = answer.json()
        assert again["links"]["reproduces"] == f"/v1/jobs/{first}"
        repeated = plain.post(f"/v1/jobs/{first}:reproduce", headers={"idempotency-key": "once"})
        assert repeated.json()["id"] == again["id"]
        *_, ended = client.follow(again["id"])
        assert ended.state == "succeeded", ended.failure
        manifest = plain.get(f"/v1/jobs/{again['id']}/results").json()["manifest"]
        assert manifest["reproduction"] == {
            "of": first, "equal": True, "rows": 6, "differences": [], "circumstances": [],
            "sentences": [said_equal(first, [each.name for each in client.results(first).artifacts])],
        }  # fmt: skip
        layers = plain.get(f"/v1/jobs/{again['id']}/layers").json()["items"]
        assert [each["sha256"] for each in layers] == [each["sha256"] for each in before[1]["items"]]
        assert (plain.get(f"/v1/jobs/{first}").json(), plain.get(f"/v1/jobs/{first}/layers").json()) == before
    content = (home / "weights.safetensors").read_bytes()
    flip_bit(home)
    changed = kronoscope("reproduce", first[-12:], "--url", url)
    assert changed.returncode == 4, changed.stderr
    assert changed.stdout.startswith(f"differs from {first}: first factor A of layer `4`, `digest_A`")
    assert f"model_sha256: {manifest['model_sha256']} then" in changed.stdout
    (home / "weights.safetensors").unlink()
    gone = kronoscope("reproduce", first, "--url", url)
    assert gone.returncode == 2
    said = " ".join(gone.stderr.split())
    assert f"model_sha256 {manifest['model_sha256']}, data_sha256 {manifest['data_sha256']}" in said
    (home / "weights.safetensors").write_bytes(content)


@pytest.mark.part(of=3, law="a run is computed again")
def test_cached_factors_are_not_used(service: tuple[Path, str]) -> None:
    document = {
        "kind": "capacity", "model": {"source": "builtin", "name": "digits_cnn"}, "task": {"type": "classification"},
        "data": {"source": "builtin", "name": "digits", "limit": 64},
    }  # fmt: skip
    with Client(service[1]) as client:
        taken: list[set[bool]] = []
        last: dict[str, str] = {}
        for named in ({}, {}, last):
            *_, job = client.follow(client.submit(document | named).id)
            last["reproduces"] = job.id
            assert job.state == "succeeded", job.failure
            observed = [row.observed for row in client.layers(job.id)]
            assert None not in observed
            taken.append({each.factors_from is not None for each in observed if each is not None})
        # the second job takes what the first has left, and is nevertheless computed anew
        assert taken == [{False}, {True}, {False}]
        manifest = client.results(job.id).manifest
    assert manifest is not None
    assert manifest["reproduction"]["equal"] is True


@pytest.mark.part(of=3, law="a run is computed again")
def test_a_job_over_stored_factors_is_reproduced_with_the_threads_it_had(
    service: tuple[Path, str], kronoscope: Run, folder: Path
) -> None:
    home, url = service
    done = kronoscope("submit", str(home / "stored.yaml"), "--wait", "--json", "--url", url)
    factors = json.loads(done.stdout)["id"]
    (folder / "stored.json").write_text(json.dumps({"kind": "reconstruction", "factors": {"job": factors}}))
    done = kronoscope("submit", "stored.json", "--wait", "--json", "--url", url)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["id"]
    found = kronoscope("reproduce", first, "--url", url, "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["equal"] is True
    with Client(url) as client:
        manifests = [client.results(each).manifest for each in (first, json.loads(found.stdout)["job"])]
    assert None not in manifests
    environments = [each["environment"] for each in manifests if each is not None]
    assert environments[0] == environments[1]
