"""Divided jobs: the factors and rows of the undivided one, whatever the number of pieces and whoever computes them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from catalog.frames import LogLine
from engine.errors import NotMergeable
from engine.factors.factor_set import FactorSet
from engine.linalg.linear_operator import Structured
from tests.worker.execution.pieces.conftest import Run, Runner
from worker.execution.data.builtin import english_paragraphs
from worker.execution.refusal import Refusal

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
DIGITS = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits", "limit": 118},
    "task": {"type": "classification"},
    "collection": {"batch_size": 16, "self_check": "off"},
}


def dense(side: Tensor | Structured, scale: float) -> Tensor:
    return side.to_dense(torch.float64) if isinstance(side, Structured) else side.to(torch.float64) * scale


def require_equal(found: FactorSet, expected: FactorSet, tolerance: float) -> None:
    """The same layers with the same facts, and each A and G within ``tolerance`` of its norm."""
    assert [layer.name for layer in found.layers] == [layer.name for layer in expected.layers]
    assert (found.examples, found.updates) == (expected.examples, expected.updates)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        for name in ("positions", "terms", "calls", "form", "shared_A_with", "rank_bound_A", "rank_bound_G"):
            assert getattr(ours, name) == getattr(theirs, name), (ours.name, name)
        if theirs.exact_trace is not None:
            assert ours.exact_trace == pytest.approx(theirs.exact_trace, rel=10 * tolerance)
        one, other = found.load(ours.ordinal), expected.load(theirs.ordinal)
        for side in ("A", "G"):
            a = dense(getattr(one, side), getattr(one, f"scale_{side}"))
            b = dense(getattr(other, side), getattr(other, f"scale_{side}"))
            assert float((a - b).norm()) <= tolerance * float(b.norm()), (ours.name, side)


def require_digests(run: Run, whole: Run) -> None:
    """The digest of the whole job's model, and that of the pieces' data as it is documented."""
    assert run.finished.model_sha256 == whole.finished.model_sha256
    assert run.finished.examples == whole.finished.examples
    lines = "".join(f"{each['data_sha256']}\n" for each in run.pieces)
    assert run.finished.data_sha256 == hashlib.sha256(lines.encode()).hexdigest()


def write_texts(path: Path, count: int) -> str:
    """Lines of text, some of which have no second token and are left out."""
    texts = english_paragraphs()
    lines = [" ".join(texts[place].split())[: 40 + 13 * (place % 5)] for place in range(count)]
    lines[3] = lines[11] = "a"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def gpt2(saved: Callable[..., Path], folder: Path) -> dict[str, Any]:
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    data = {"source": "synthetic", "shape": [12], "examples": 45, "vocabulary": 256}
    path = str(saved("AutoModelForCausalLM", config))
    return {
        "kind": ["factors"],
        "model": {"source": "directory", "path": path},
        "data": data,
        "task": {"type": "causal_lm"},
        "collection": {"batch_size": 4, "update_freq": 2, "self_check": "first"},
    }


def sentences(minilm: Path, folder: Path) -> dict[str, Any]:
    return {
        "kind": ["factors"],
        "model": {"source": "directory", "path": str(minilm)},
        "data": {"source": "file", "path": write_texts(folder / "texts.txt", 14), "sequence_length": 12},
        "task": {"type": "sentence_embedding"},
        "collection": {"batch_size": 2, "self_check": "off"},
    }


def with_dtype(document: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {**document, "collection": {**document["collection"], "dtype": dtype}}


def test_eigenvalues_are_corrected_in_one_basis_over_two_rounds(runner: Runner) -> None:
    asked = {**DIGITS, "kind": ["spectrum", "factors"], "spectrum": {"of": "ekfac"}}
    asked["collection"] = {**asked["collection"], "ekfac": True, "dtype": "float64"}
    whole = runner.job("whole", asked)
    run = runner.job("divided", {**asked, "shards": 3}, order=lambda pieces: list(pieces)[::-1])
    assert [each["piece"]["round"] for each in run.pieces] == ["collect"] * 3 + ["correct"] * 3
    assert run.finished.examples == whole.finished.examples == 118
    require_equal(run.factors, whole.factors, 1e-12)
    for row, expected in zip(run.rows, whole.rows, strict=True):
        assert row["record"]["ekfac_trace"] == pytest.approx(expected["record"]["ekfac_trace"], rel=1e-12)
    found, expected_factors = run.factors, whole.factors
    assert found.load_corrected is not None
    assert expected_factors.load_corrected is not None
    for layer in found.layers:
        ours, theirs = found.load_corrected(layer.ordinal), expected_factors.load_corrected(layer.ordinal)
        difference = ours.eigenvalues.flatten().sort().values - theirs.eigenvalues.flatten().sort().values
        # eigenvectors of equal eigenvalues, as of what no example reached, are any basis of their span
        assert float(difference.norm()) <= 1e-9 * float(theirs.eigenvalues.norm()), layer.name
    again = runner.job("again", {**asked, "shards": 3})
    corrected = [(row["layer"], row["record"]["digest_ekfac"]) for row in run.rows]
    assert corrected == [(row["layer"], row["record"]["digest_ekfac"]) for row in again.rows]


def test_what_the_loaders_say_stands_in_the_record_of_the_whole(runner: Runner, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    config = transformers.BertConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                                     vocab_size=60, num_labels=2)  # fmt: skip
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(base)
    (base / "config.json").write_text((base / "config.json").read_text().replace("{", '{"strange": 1,', 1))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    place = "base_model.model.bert.encoder.layer.0.attention.self.query"
    pair = {f"{place}.lora_A.weight": torch.ones(1, 8), f"{place}.lora_B.weight": torch.ones(8, 1)}
    safetensors.torch.save_file(pair, adapter / "adapter_model.safetensors")
    asked = {
        "kind": ["factors"],
        "model": {"source": "directory", "path": str(base), "adapter": str(adapter)},
        "data": {"source": "synthetic", "shape": [5], "examples": 8, "vocabulary": 60, "classes": 2},
        "task": {"type": "sequence_classification"},
        "collection": {"batch_size": 2, "self_check": "off"},
    }
    whole, divided = (runner.job(name, {**asked, **more}) for name, more in (("whole", {}), ("cut", {"shards": 2})))
    said = [(each.finished.unused, each.finished.notices, each.finished.reading, each.finished.adapters)
            for each in (whole, divided)]  # fmt: skip
    assert said[0] == said[1]
    assert len(whole.finished.adapters) == 1
    assert "config.json: `strange`" in whole.finished.unused


def test_a_source_without_a_length_is_counted(runner: Runner, import_path: None, tmp_path: Path) -> None:
    (tmp_path / "counted_data.py").write_text(
        "import torch\n"
        "def examples(sizes):\n"
        "    g = torch.Generator().manual_seed(5)\n"
        "    for size in sizes:\n"
        "        yield torch.randn(size, 1, 8, 8, generator=g), torch.randint(0, 10, (size,), generator=g)\n"
    )
    data = {"source": "factory", "factory": "counted_data:examples", "kwargs": {"sizes": [50, 3, 31]}}
    asked = with_dtype({**DIGITS, "data": data, "kind": ["factors"]}, "float64")
    whole, divided = runner.job("whole", asked), runner.job("divided", {**asked, "shards": 2})
    assert [(each["piece"]["begin"], each["piece"]["end"]) for each in divided.pieces] == [(0, 48), (48, 84)]
    require_equal(divided.factors, whole.factors, 1e-12)


def test_a_factory_that_draws_its_weights_anew_is_named(runner: Runner, import_path: None, tmp_path: Path) -> None:
    (tmp_path / "drawn_model.py").write_text(
        "import os, torch\n"
        "def make():\n"
        "    torch.manual_seed(int.from_bytes(os.urandom(4), 'little'))\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    asked = {**DIGITS, "model": {"source": "factory", "factory": "drawn_model:make"}, "shards": 2}
    with pytest.raises(Refusal) as caught:
        runner.job("drawn", asked)
    assert caught.value.code == "model_differs"
    assert caught.value.pointer == "/model"
    digests = {word.strip(";,") for word in caught.value.message.split() if len(word.strip(";,")) == 64}
    assert len(digests) == 2
    assert "piece 1 of 2" in caught.value.message
    assert "piece 2 of 2" in caught.value.message


@pytest.mark.parametrize(
    ("shards", "message"), [(119, "is 119, and the data hold 118 examples; take 118 or fewer"), (4096, "is 4096")]
)
def test_more_pieces_than_examples_are_refused(runner: Runner, shards: int, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        runner.job("many", {**DIGITS, "shards": shards})
    assert caught.value.pointer == "/shards"


def test_more_pieces_than_batches_are_as_many_as_batches(runner: Runner) -> None:
    run = runner.job("many", {**DIGITS, "kind": "factors", "shards": 100})
    assert len(run.pieces) == 8
    said = [frame.message for frame in run.frames if isinstance(frame, LogLine) and frame.level == "warning"]
    assert any("can be cut into 8 pieces at most" in line for line in said)


def test_one_device_makes_one_piece_of_auto(runner: Runner) -> None:
    run = runner.job("auto", {**DIGITS, "kind": "factors", "shards": "auto"})
    assert len(run.pieces) == 1
    said = [frame.message for frame in run.frames if isinstance(frame, LogLine)]
    assert any(line.startswith("`shards: auto` takes 1: 1 device is at hand") for line in said)


def _tampered(run: Run, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> dict[str, Any]:
    """The assignment of the job's last attempt, with other pieces."""
    return {"pieces": change(json.loads(json.dumps(run.pieces))), "divided": str(run.folder / "artifacts")}


def test_every_example_is_counted_once(runner: Runner) -> None:
    asked = {**DIGITS, "kind": "factors", "shards": 3}
    run = runner.job("counted", asked)
    own = {"document": asked, "artifacts": str(run.folder / "other")}
    with pytest.raises(NotMergeable, match="every example counts once"):
        runner.attempt({**own, **_tampered(run, lambda pieces: [*pieces[:2], pieces[1]])})
    with pytest.raises(NotMergeable, match="every example counts once"):
        runner.attempt({**own, **_tampered(run, lambda pieces: pieces[:2])})

    def fewer(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
        pieces[1]["examples"] -= 1
        return pieces

    with pytest.raises(Refusal, match=r"piece 2 of 3 .* has the examples 48 to 96, and read 47"):
        runner.attempt({**own, **_tampered(run, fewer)})


SHUFFLED = (
    "import os, random, torch\n"
    "def examples(seed=None):\n"
    "    g = torch.Generator().manual_seed(5)\n"
    "    images, classes = torch.randn(64, 1, 8, 8, generator=g), torch.randint(0, 10, (64,), generator=g)\n"
    "    order = list(range(64))\n"
    "    random.Random(os.urandom(8) if seed is None else seed).shuffle(order)\n"
    "    for begin in range(0, 64, 16):\n"
    "        yield images[order[begin:begin + 16]], classes[order[begin:begin + 16]]\n"
)


def test_data_that_are_shuffled_anew_in_each_piece_are_refused(
    runner: Runner, import_path: None, tmp_path: Path
) -> None:
    (tmp_path / "shuffled_data.py").write_text(SHUFFLED)
    data = {"source": "factory", "factory": "shuffled_data:examples", "kwargs": {"seed": 3}}
    collection = {**DIGITS["collection"], "ekfac": True}
    asked = {**DIGITS, "kind": ["factors"], "data": data, "shards": 2, "collection": collection}
    run = runner.job("seeded", asked)
    assert len(run.pieces) == 4
    # what one of them read in a later round was other data
    (tmp_path / "seeded" / "correct-1" / "factors" / "read.json").write_text('{"before": "a", "after": "b"}')
    known = {"pieces": run.pieces, "divided": str(run.folder / "artifacts"), "artifacts": str(tmp_path / "again")}
    with pytest.raises(Refusal, match="not the same in every round: up to example 64, piece 2 of 2") as caught:
        runner.attempt({"document": asked, **known})
    with pytest.raises(Refusal, match=r"not the same in every piece: up to example 32, piece 1 of 2 .* piece 2 of 2"):
        runner.job("drawn", {**asked, "data": {**data, "kwargs": {}}})
    assert (caught.value.code, caught.value.pointer) == ("data_differ", "/data")
