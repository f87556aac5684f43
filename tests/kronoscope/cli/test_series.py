"""A series through the command line and a worker: the overlaps and largest eigenvalues of trained checkpoints."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import transformers

from kronoscope import Client
from kronoscope.local import load_factors
from tests.api.server import held_port
from tests.kronoscope.conftest import KRONOSCOPE, environment

Run = Callable[..., subprocess.CompletedProcess[str]]

DOCUMENT = """\
kind: [capacity, spectrum]
model: {source: directory, path: FOLDER/0}
data: {source: synthetic, shape: [6], examples: 8, vocabulary: 17}
task: {type: causal_lm}
collection: {dtype: float64}
keep: [factors]
spectrum: {of: [kfac, hessian], end: largest, k: 1, density: false, trace: none}
compare_curvature: {k: [1, 3]}
series: {model: [FOLDER/0, FOLDER/1, FOLDER/torn, FOLDER/2, FOLDER/3], learning_rate: 0.5}
"""


def language_model(width: int = 8) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=2, n_embd=width, vocab_size=17, n_positions=8, bos_token_id=0,
                                eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four checkpoints of a training, one without weights, and one of another width."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = language_model()
    ids = torch.randint(17, (64, 6), generator=torch.Generator().manual_seed(1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for place in range(4):
        model.save_pretrained(folder / str(place))
        for _ in range(10):
            optimiser.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimiser.step()
    model.save_pretrained(folder / "torn")
    (folder / "torn" / "model.safetensors").unlink()
    language_model(12).save_pretrained(folder / "wide")
    return folder


@pytest.fixture(scope="module")
def url(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``kronoscope serve --embedded``."""
    with held_port() as port, subprocess.Popen(
        [*KRONOSCOPE, "serve", "--embedded", "--port", str(port), "--allow-directory", str(checkpoints)],
        cwd=tmp_path_factory.mktemp("serving"), env=environment(), stderr=subprocess.PIPE, text=True,
    ) as serving:  # fmt: skip
        assert serving.stderr is not None
        assert any(line.startswith("ready:") for line in serving.stderr), "it never came up"
        yield f"http://127.0.0.1:{port}"
        serving.send_signal(signal.SIGINT)
        serving.communicate(timeout=300)


def leading(folder: Path, layer: str, k: int) -> torch.Tensor | None:
    """The k leading eigenvectors of a layer's G ⊗ A, dense, from the factors that its job kept; None at a tie."""
    factors = load_factors(folder)[layer]
    A = torch.diag(factors.A) if factors.A.ndim == 1 else factors.A
    values, vectors = torch.linalg.eigh(torch.kron(factors.G.double(), A.double()))
    return vectors[:, -k:] if values[-k] - values[-k - 1] > 1e-9 * values[-1] else None


def overlap(folders: Sequence[Path], layer: str, k: int) -> float | None:
    """‖Uᵀ V‖² / k of the leading eigenvectors in two folders."""
    first, second = (leading(folder, layer, k) for folder in folders)
    return None if first is None or second is None else float((first.T @ second).square().sum()) / k


def test_a_series_is_measured_compared_and_shown(
    kronoscope: Run, folder: Path, checkpoints: Path, url: str, tmp_path: Path
) -> None:
    (folder / "series.yaml").write_text(DOCUMENT.replace("FOLDER", str(checkpoints)))
    done = kronoscope("submit", "series.yaml", "--wait", "--json", "--url", url)
    assert done.returncode == 0, done.stderr
    series_id = json.loads(done.stdout)["id"]
    shown = json.loads(kronoscope("results", series_id, "--json", "--url", url).stdout)
    points = shown["points"]
    assert [each["state"] for each in points] == ["succeeded", "succeeded", "failed", "succeeded", "succeeded"]
    assert "model.safetensors" in points[2]["failure"]
    assert [each["index"] for each in shown["overlaps"]] == [1, 4]
    with Client(url) as client:
        for point in points:
            curvatures = [] if point["failure"] else client.results(point["job"]).summary["spectrum"].curvatures
            assert point["largest"] == {each.of: each.largest[0].value for each in curvatures}
            for artifact in () if point["failure"] else client.results(point["job"]).artifacts:
                client.download(point["job"], artifact, tmp_path / point["job"])
        layers = [row.layer for row in client.layers(points[0]["job"], kind="capacity") if row.status == "covered"]
    for pair in shown["overlaps"]:
        folders = [tmp_path / points[place]["job"] / "factors" for place in (pair["index"] - 1, pair["index"])]
        for k in (1, 3):
            found = [value for each in layers if (value := overlap(folders, each, k)) is not None]
            assert len(found) == len(layers) - 1  # all positions occur alike: those of `wpe` are a tie
            assert pair["overlaps"][str(k)] == pytest.approx(sum(found) / len(found), rel=1e-9)
    table = kronoscope("results", series_id[-12:], "--url", url).stdout
    assert "λ_max hessian" in table
    assert f"failed: {checkpoints}/torn: " in table
    assert kronoscope("watch", series_id, "--url", url).stdout == table


def test_checkpoints_of_two_architectures_are_refused(
    kronoscope: Run, folder: Path, checkpoints: Path, url: str
) -> None:
    (folder / "series.yaml").write_text(DOCUMENT.replace("FOLDER", str(checkpoints)))
    named = f"series.model=[{checkpoints}/0, {checkpoints}/wide, {checkpoints}/1]"
    done = kronoscope("submit", "series.yaml", "--wait", "--url", url, "--set", "kind=capacity", "--set", named)
    assert done.returncode == 2
    said = done.stderr.replace("\n", " ")
    assert f"/series/model/1 checkpoint 2 ({checkpoints}/wide) is of another architecture than checkpoint 1" in said
    assert "`transformer.wte` is Embedding, 12 × 17, 204 parameters" in said


def test_a_foreground_run_refuses_a_series_and_plans_its_model(
    kronoscope: Run, folder: Path, checkpoints: Path
) -> None:
    (folder / "series.yaml").write_text(DOCUMENT.replace("FOLDER", str(checkpoints)))
    done = kronoscope("run", "series.yaml", "--output", "out")
    assert done.returncode == 2
    assert "`series` makes a job for each checkpoint, which a service does" in done.stderr.replace("\n", " ")
    planned = kronoscope("plan", "series.yaml")
    assert planned.returncode == 0, planned.stderr
