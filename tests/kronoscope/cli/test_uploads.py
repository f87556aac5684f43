"""Uploads as their user sends them, from a folder and a file to a service, and what jobs make of them."""

import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save_file

from catalog.requests.uploads import DeclaredFile, UploadDocument
from catalog.responses.layer_record import LayerRecord
from kronoscope.client import Client, ClientError
from kronoscope.client.uploads import files_of
from tests.kronoscope.cli.test_input_notices import JOB, Run
from tests.kronoscope.cli.test_input_notices import model as model  # noqa: PLC0414 - a fixture
from tests.kronoscope.cli.test_serve import home as home  # noqa: PLC0414 - a fixture
from tests.kronoscope.cli.test_serve import url as url  # noqa: PLC0414 - a fixture
from worker.execution.data.builtin import digits


class Cutting:
    """A line to a service that breaks off after so many bytes were sent over it, once."""

    def __init__(self, url: str, after_bytes: int) -> None:
        self.target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self.left = after_bytes
        self.cut = False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self.listener.accept()
            except OSError:
                return
            onward = socket.create_connection(self.target)
            for source, target in ((line, onward), (onward, line)):
                threading.Thread(target=self._pass, args=(source, target, source is line), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        try:
            while piece := source.recv(4096):
                self.left -= len(piece) if counted else 0
                if self.left < 0 and not self.cut:
                    self.cut = True
                    break
                target.sendall(piece)
        except OSError:
            pass
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # or the thread of the other direction would hold it open
            each.close()


@pytest.fixture
def bare(folder: Path, model: Path) -> None:
    """The job's document without its model, in a file."""
    kept = [line for line in JOB.splitlines() if not line.startswith(("model:", "data:"))]
    (folder / "bare.yaml").write_text(
        "\n".join([*kept, "data: {source: file, path: x.jsonl, label_key: gold}", "keep: [factors]"])
    )


@pytest.fixture
def digests(folder: Path, kronoscope: Run, model: Path) -> dict[tuple[str, str], Any]:
    """What a foreground run of the same folder measures."""
    done = kronoscope("run", "job.yaml", "--output", "out", "--set", "keep=[factors]")
    assert done.returncode == 0, done.stderr
    return logged((folder / "out" / "log.jsonl").read_text())


def logged(lines: str) -> dict[tuple[str, str], Any]:
    """Each layer's record in a log, digests of its factors among it."""
    rows = [json.loads(line) for line in lines.splitlines()]
    names = LayerRecord.__dataclass_fields__
    return {(row["kind"], row["layer"]): {name: row[name] for name in names} for row in rows}


@pytest.mark.usefixtures("bare")
def test_a_model_and_data_that_broke_off_are_gone_on_with_and_measured_as_on_the_spot(
    folder: Path, model: Path, kronoscope: Run, url: str, digests: dict[tuple[str, str], Any]
) -> None:
    size = sum(each.stat().st_size for each in model.iterdir())
    line = Cutting(url, size // 2)
    sent = ("submit", "bare.yaml", "--upload", "model", "--upload", "pairs.jsonl", "--wait", "--json")
    done = kronoscope(*sent, "--url", line.url)
    assert done.returncode == 0, done.stderr
    assert line.cut
    job = json.loads(done.stdout)
    assert {job["document"][each]["source"] for each in ("model", "data")} == {"upload"}
    assert job["document"]["data"]["label_key"] == "gold"
    with Client(url) as client:
        assert logged(client.log(job["id"])) == digests
        assert len(digests) > 4
        ran = json.loads((folder / "out" / "job.json").read_text())
        manifest = client.results(job["id"]).manifest or {}
        for name in ("model_sha256", "data_sha256", "reading", "examples"):
            assert manifest[name] == ran[name], name
        # every byte of the factors is the same
        files = [{each["name"]: each["sha256"] for each in ran["artifacts"]}]
        files.append({each.name: each.sha256 for each in client.results(job["id"]).artifacts})
        kept, wanted = ({name: each[name] for name in each if name.endswith(".safetensors")} for each in files)
        assert kept == wanted
        assert len(kept) > 4
        made = client.upload(model)
        assert (made.id, made.complete) == (job["document"]["model"]["id"], True)
        assert "generation_config.json" not in {each.name for each in made.files}
        # a job whose upload is deleted before it begins fails with the remedy, and the others stay
        again = client.rerun(job["id"])
        httpx.delete(f"{url}/v1/uploads/{made.id}", trust_env=False).raise_for_status()
        *_, ended = client.follow(again.id)
        if ended.state == "failed":  # unless it began before
            assert ended.failure is not None
            assert (ended.failure.code, ended.failure.pointer) == ("not_found", "/model/id")
        with pytest.raises(ClientError, match="is not a model upload of yours"):
            client.rerun(job["id"])
    said = kronoscope(*sent[:-2], "--validate-only", "--url", url)
    assert said.returncode == 0, said.stderr
    assert "not sent: generation_config.json" in said.stderr + said.stdout


def test_queries_come_by_upload_too(folder: Path, kronoscope: Run, url: str) -> None:
    images, labels = (each[1000:1005] for each in digits())
    save_file({"inputs": images.contiguous(), "targets": labels.contiguous()}, folder / "asked.safetensors")
    document = {
        "kind": "influence",
        "model": {"source": "builtin", "name": "digits_mlp"},
        "data": {"source": "builtin", "name": "digits", "limit": 40},
        "task": {"type": "classification"},
        "influence": {"query": {"source": "file", "path": "asked.safetensors"}},
    }
    (folder / "asked.yaml").write_text(json.dumps(document))
    done = kronoscope("run", "asked.yaml", "--output", "asked")
    assert done.returncode == 0, done.stderr
    ran = json.loads((folder / "asked" / "job.json").read_text())
    with Client(url) as client:
        # a name that no service takes, of which the suffix is enough
        made = client.upload((folder / "asked.safetensors").rename(folder / "my données.SAFETENSORS"))
        assert [each.name for each in made.files] == ["data.safetensors"]
        named = document | {"influence": {"query": {"source": "upload", "id": made.id}}}
        job = client.submit(named)
        *_, ended = client.follow(job.id)
        assert ended.state == "succeeded", ended.failure
        found = {each.name: each.sha256 for each in client.results(job.id).artifacts}
        name = "influence/scores-00000.safetensors"
        assert found[name] == {each["name"]: each["sha256"] for each in ran["artifacts"]}[name]
        with pytest.raises(ClientError, match="is not a data upload of yours"):
            client.submit(document | {"influence": {"query": {"source": "upload", "id": "0" * 32}}})


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("pairs.csv", "pairs.csv"), ("a.b-c_d.txt", "a.b-c_d.txt"), ("my données.csv", "data.csv"),
        ("DATA.CSV", "data.csv"), (".hidden.csv", "data.csv"), (".csv", "data.csv"), ("-x.jsonl", "data.jsonl"),
        ("n" * 130 + ".Parquet", "data.parquet"), ("a.csv.gz", None), ("csv", None), ("a.CSV ", None),
    ],
)  # fmt: skip
def test_a_file_of_data_is_declared_under_a_name_that_a_service_takes(
    tmp_path: Path, name: str, declared: str | None
) -> None:
    place = tmp_path / name
    place.write_bytes(b"x")
    assert files_of(place, "data") == ({} if declared is None else {declared: place})
    if declared is not None:
        UploadDocument(kind="data", files=(DeclaredFile(name=declared, size_bytes=1, sha256="0" * 64),))


@pytest.mark.parametrize("name", ["model.zip", "weights.bin", "notes.md", "absent.csv"])
def test_what_is_no_model_and_no_data_is_refused_before_anything_is_sent(
    folder: Path, kronoscope: Run, name: str
) -> None:
    if name != "absent.csv":
        (folder / name).write_bytes(b"x")
    done = kronoscope("submit", "job.yaml", "--upload", name, "--url", "http://127.0.0.1:9")
    assert done.returncode != 0
    assert "unpack archives, and convert pickles to safetensors" in " ".join(done.stderr.split())


def test_a_foreground_run_takes_no_upload(folder: Path, kronoscope: Run) -> None:
    (folder / "job.yaml").write_text(JOB.replace("{source: directory, path: model}", "{source: upload, id: '01'}"))
    done = kronoscope("run", "job.yaml", "--output", "out")
    assert done.returncode == 2
    assert "is an upload of a service; in the foreground name its folder or file" in " ".join(done.stderr.split())
