"""Adapters against peft: the same outputs and the same trainable tensors; whatever else is asked for is refused."""

import hashlib
import importlib
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from catalog.requests.inputs import DirectoryModel, Task
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal

Saved = Callable[..., Path]
D = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 60}
LLAMA = D | {"num_key_value_heads": 1, "max_position_embeddings": 24}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "tied": ("LlamaConfig", LLAMA | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 60, "n_positions": 24,
                            "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}),
    "bert": ("BertConfig", {**D, "max_position_embeddings": 24}),
    "distilbert": ("DistilBertConfig", {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "vocab_size": 60,
                                        "max_position_embeddings": 24}),
    "vit": ("ViTConfig", {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32,
                          "image_size": 8, "patch_size": 4, "num_channels": 1}),
    "resnet": ("ResNetConfig", {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                                "layer_type": "basic"}),
}  # fmt: skip
AUTO = {
    "causal_lm": "AutoModelForCausalLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "classification": "AutoModelForImageClassification",
    "sentence_embedding": "AutoModel",
}
CLASSES = {"sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS"}
Q_V = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"]}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LoRA": ("llama", "causal_lm", Q_V),
    "rsLoRA": ("llama", "causal_lm", {**Q_V, "use_rslora": True}),
    "DoRA": ("llama", "causal_lm", {**Q_V, "use_dora": True, "lora_dropout": 0.3}),
    "DoRA, one layer": ("llama", "causal_lm", {"r": 2, "target_modules": ["v_proj"], "use_dora": True}),
    "patterns": ("llama", "causal_lm", {
        "r": 4, "target_modules": "all-linear", "rank_pattern": {"q_proj": 2, r"model\.layers\.0\.mlp.*": 1},
        "alpha_pattern": {"^model.layers.1.self_attn.q_proj": 3, "layers.1.self_attn.v_proj": 1, "q_proj": 7}}),
    "some layers": ("llama", "causal_lm", {**Q_V, "layers_to_transform": [1], "layers_pattern": "layers"}),
    "biases of the adapter": ("gpt2", "causal_lm", {"r": 2, "target_modules": ["c_attn"], "lora_bias": True}),
    "Conv1D": ("gpt2", "causal_lm", {"r": 2, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "Conv1D, DoRA": ("gpt2", "causal_lm", {"r": 2, "target_modules": ["c_fc"], "use_dora": True}),
    "embedding": ("gpt2", "causal_lm", {"r": 2, "target_modules": ["wte", "c_attn"]}),
    "untied embedding": ("bert", "sentence_embedding", {"r": 2, "target_modules": ["word_embeddings"]}),
    "bias: all": ("bert", "sequence_classification", {"r": 2, "target_modules": ["query"], "bias": "all"}),
    "bias: lora_only": ("bert", "token_classification", {"r": 2, "target_modules": ["query"], "bias": "lora_only"}),
    "head": ("distilbert", "sequence_classification", {"r": 2, "target_modules": ["q_lin", "v_lin"]}),
    "tied head, trained": ("tied", "causal_lm", {**Q_V, "modules_to_save": ["lm_head"]}),
    "tied head, adapted": ("tied", "causal_lm", {"r": 2, "target_modules": ["lm_head"]}),
    "bare model": ("bert", "sentence_embedding", {"r": 2, "target_modules": ["key", "dense"]}),
    "images": ("vit", "classification", {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["classifier"]}),
    "Conv2d": ("resnet", "classification", {"r": 2, "target_modules": ["convolution"]}),
}  # fmt: skip


def base(saved: Saved, family: str, auto: str, layers: int = 2) -> Path:
    name, fields = CONFIGS[family]
    depth = next((field for field in ("num_hidden_layers", "n_layer", "n_layers") if field in fields), None)
    config = getattr(importlib.import_module("transformers"), name)(
        **fields | ({} if depth is None else {depth: layers})
    )
    return saved(auto, config)


def trained(folder: Path, task: str, labels: int = 2, seed: int = 1, **options: Any) -> Path:
    """Train nothing, draw everything: an adapter whose every tensor differs from the base's, saved by peft."""
    peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    net = getattr(transformers, AUTO[task]).from_pretrained(folder, num_labels=labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(net, peft.LoraConfig(task_type=CLASSES.get(task), **options))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder.parent / "adapter")
    return folder.parent / "adapter"


def by_peft(folder: Path, adapter: Path, task: str, labels: int = 2) -> Any:
    peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = getattr(transformers, AUTO[task]).from_pretrained(folder, num_labels=labels)
        return peft.PeftModel.from_pretrained(net, adapter, is_trainable=True).eval()


def loaded(folder: Path, adapter: Path | str | None, task: str, *, merged: bool = False, **around: Any) -> Any:
    load = importlib.import_module("worker.execution.models.checkpoint").load
    beside = {} if adapter is None else {"adapter": str(adapter), "adapter_merged": merged}
    source = DirectoryModel(source="directory", path=str(folder), **beside)  # type: ignore[arg-type]
    return load(source, Task(type=task), LoaderContext(store=folder / "store", **around))  # type: ignore[arg-type]


def outputs(model: Any, family: str) -> torch.Tensor:
    ids = torch.arange(2, 14).view(2, 6)
    inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family in ("vit", "resnet"):
        inputs = {"pixel_values": torch.linspace(0, 1, 128).view(2, 1, 8, 8)}
    with torch.no_grad():
        found: torch.Tensor = model(**inputs)[0]
    return found


def apart(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest difference over the largest output, or over one: it is float32's rounding, which grows with them."""
    return float((found - truth).abs().max() / truth.abs().max().clamp(min=1))


def bare(name: str) -> str:
    """The name that a tensor or layer has in both libraries, without what each puts around or into it."""
    plain = re.sub(r"\.(modules_to_save\.default|base_layer|default|weight)(?=\.|$)", "", name)
    return re.sub("lora_embedding_([AB])", r"lora_\1", plain.removeprefix("base_model.model."))


def trainable(model: Any) -> dict[str, torch.Tensor]:
    """Trainable tensors; the first matrix of an embedding lies as in an embedding."""
    return {
        bare(name): tensor.detach().T if name.endswith("lora_embedding_A.default") else tensor.detach()
        for name, tensor in model.named_parameters()
        if tensor.requires_grad
    }


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_trainable_tensors_are_those_of_peft(saved: Saved, case: str) -> None:
    family, task, options = CASES[case]
    folder = base(saved, family, AUTO[task])
    adapter = trained(folder, task, **options)
    below = outputs(loaded(folder, None, task).model, family)
    truth = by_peft(folder, adapter, task)
    assert (outputs(truth, family) - below).abs().max() > 1e-3, "the adapter changes nothing"
    found = loaded(folder, adapter, task).model
    assert apart(outputs(found, family), outputs(truth, family)) <= 1e-6
    expected, own = trainable(truth), trainable(found)
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(
    "case", ["DoRA", "rsLoRA", "Conv1D", "Conv1D, DoRA", "untied embedding", "Conv2d", "bias: all"]
)
def test_merged_it_is_the_model_that_peft_merges(saved: Saved, case: str) -> None:
    family, task, options = CASES[case]
    folder = base(saved, family, AUTO[task])
    adapter = trained(folder, task, **options)
    truth = by_peft(folder, adapter, task).merge_and_unload()
    found = loaded(folder, adapter, task, merged=True).model
    assert apart(outputs(found, family), outputs(truth, family)) <= 1e-6
    state, own = truth.state_dict(), found.state_dict()
    assert own.keys() == state.keys()
    assert all(torch.allclose(own[name], tensor, rtol=0, atol=1e-6) for name, tensor in state.items())
    assert all(parameter.requires_grad for parameter in found.parameters())


def test_a_merged_head_is_untied_from_the_embedding(saved: Saved) -> None:
    """peft adds the product to both, which is another model than the one that was trained."""
    family, task, options = CASES["tied head, adapted"]
    folder, notes = base(saved, family, AUTO[task]), []
    adapter = trained(folder, task, **options)
    truth = outputs(by_peft(folder, adapter, task), family)
    found = loaded(folder, adapter, task, merged=True, note=notes.append).model
    assert apart(outputs(found, family), truth) <= 1e-6
    assert any("`lm_head.weight` is no longer tied" in each for each in notes)


def test_a_base_without_a_head_takes_that_of_the_adapter(saved: Saved) -> None:
    family, task = "bert", "sequence_classification"
    folder = base(saved, family, "AutoModel")
    adapter = trained(folder, task, labels=5, r=2, target_modules=["query"])
    records: list[Any] = []
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"id2label": {"0": "no", "1": "yes"}}))
    whole = loaded(folder, adapter, task, adapted=records.append)
    found = whole.model
    # "no" was the name of another head's class
    assert whole.class_names == tuple(f"LABEL_{place}" for place in range(5))
    assert apart(outputs(found, family), outputs(by_peft(folder, adapter, task, 5), family)) <= 1e-6
    assert found.classifier.weight.shape == (5, 16)
    assert records[0].base_sha256 is None


def test_the_record_names_base_and_adapter_by_their_digests(saved: Saved) -> None:
    folder = base(saved, "llama", AUTO["causal_lm"])
    adapter = trained(folder, "causal_lm", **Q_V)
    weights_digest = importlib.import_module("worker.execution.input_digests").weights_digest
    records: list[Any] = []
    loaded(folder, adapter, "causal_lm", merged=True, adapted=records.append)
    alone = importlib.import_module("worker.execution.models.checkpoint").load(
        DirectoryModel(source="directory", path=str(folder)), Task(type="causal_lm"), LoaderContext(store=folder)
    )
    (record,) = records
    assert (record.base, record.adapter, record.merged) == ("checkpoint", "adapter", True)
    assert record.base_sha256 == weights_digest(alone.model)
    for name, digest in (("config.json", record.config_sha256), ("model.safetensors", record.weights_sha256)):
        assert digest == hashlib.sha256((adapter / f"adapter_{name}").read_bytes()).hexdigest()


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("case", ["DoRA", "embedding", "Conv2d", "head"])
def test_a_plan_has_the_same_layers_without_a_number(saved: Saved, case: str) -> None:
    family, task, options = CASES[case]
    folder = base(saved, family, AUTO[task])
    adapter = trained(folder, task, **options)
    shapes = [
        {name: (tuple(each.shape), each.requires_grad) for name, each in found.model.named_parameters()}
        for found in (loaded(folder, adapter, task, shapes_only=only) for only in (True, False))
    ]
    assert shapes[0] == shapes[1]


BIASES = pytest.param(
    "bias: all",
    marks=pytest.mark.nightly(
        covered_by="tests/kronoscope/cli/test_input_notices.py::"
        "test_a_run_measures_what_peft_trains_and_records_base_and_adapter"
    ),
)


@pytest.mark.parametrize("case", ["DoRA, one layer", BIASES])
def test_every_trainable_parameter_is_covered_and_has_the_trace_of_plain_autograd(saved: Saved, case: str) -> None:
    family, task, options = CASES[case]
    folder = base(saved, family, AUTO[task], layers=1)
    local = importlib.import_module("kronoscope.local")
    adapter = trained(folder, task, **options)
    ids = torch.arange(2, 14).view(2, 6)
    inputs = {"input_ids": ids, "position_ids": torch.arange(6).expand(2, 6).clone()}
    targets = ids if task == "causal_lm" else torch.tensor([0, 1])
    # against peft's own model, so that it need not be checked against itself
    options_of = {"batch_size": 2, "dtype": "float64", "fisher": "type2", "min_coverage": 1.0, "self_check": "off"}
    of = [
        local.measure(model, [(inputs, targets)], task=task, collection=options_of).of("capacity")
        for model in (loaded(folder, adapter, task).model, by_peft(folder, adapter, task))
    ]
    traces = [{bare(name): row.metrics.trace for name, row in each.items()} for each in of]
    assert traces[0] == pytest.approx(traces[1], rel=1e-9)
    assert any("lora_A" in name for name in traces[0])


def test_older_names_and_wrappers_prefixes_are_read(saved: Saved) -> None:
    folder = base(saved, "vit", AUTO["classification"])
    adapter = trained(folder, "classification", **CASES["images"][2])
    truth = outputs(by_peft(folder, adapter, "classification"), "vit")
    path, lines = adapter / "adapter_model.safetensors", []
    older = {
        "module."
        + re.sub(r"layers\.(\d)\.attention\.q_proj", r"encoder.layer.\1.attention.attention.query", name): tensor
        for name, tensor in safetensors.torch.load_file(path).items()
    }
    safetensors.torch.save_file(
        {re.sub(r"lora_([AB])", r"lora_\1.default", name): each for name, each in older.items()}, path
    )
    found = loaded(folder, adapter, "classification", log=lambda level, message: lines.append(message)).model
    assert apart(outputs(found, "vit"), truth) <= 1e-6
    assert any("without a wrapper's prefix" in line for line in lines)


def test_an_adapter_of_the_hub_is_read_from_the_store_at_its_commit(saved: Saved, tmp_path: Path) -> None:
    folder = base(saved, "llama", AUTO["causal_lm"])
    adapter = trained(folder, "causal_lm", **Q_V)
    commit, lines, records = "0123456789abcdef0123456789abcdef01234567", [], []
    hub = folder / "store" / "hub" / "models--someone--tuned"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text(commit)
    shutil.copytree(adapter, hub / "snapshots" / commit)
    expected = outputs(loaded(folder, adapter, "causal_lm").model, "llama")
    around = {"log": lambda _, line: lines.append(line), "adapted": records.append}
    found = loaded(folder, "someone/tuned", "causal_lm", **around).model
    assert torch.equal(outputs(found, "llama"), expected)
    assert f"adapter someone/tuned at commit {commit}" in lines
    assert records[0].adapter == f"someone/tuned at commit {commit}"
    for strange, said in (
        ("someone/else", r"not in the model store.*a folder is written \./someone/else"),
        ("a b", "not"),
    ):
        with pytest.raises(Refusal, match=said) as refused:
            loaded(folder, strange, "causal_lm")
        assert refused.value.pointer == "/model/adapter"


def test_an_adapter_in_a_folder_of_its_base_is_applied_and_not_said_to_be_unused(saved: Saved) -> None:
    folder = base(saved, "llama", AUTO["causal_lm"])
    trained(folder, "causal_lm", **Q_V).rename(folder / "tuned")
    said: list[str] = []
    loaded(folder, folder / "tuned", "causal_lm", note=said.append, unused=said.append)
    assert not any("tuned" in each for each in said)
