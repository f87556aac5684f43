"""Hostile and foreign adapters: nothing in a configuration acts, and what is not LoRA is refused by name."""

import importlib
import json
import re
import subprocess
import sys
import time
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
CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["c_attn"],
    "base_model_name_or_path": "model",
}
PAIR = "base_model.model.transformer.h.0.attn.c_attn.lora_"
TENSORS = {f"{PAIR}A.weight": torch.ones(2, 16), f"{PAIR}B.weight": torch.ones(48, 2)}


@pytest.fixture
def model(saved: Saved) -> Path:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=60, n_positions=24, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return saved("AutoModelForCausalLM", config)


def written(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    adapter = folder.parent / "adapter"
    adapter.mkdir(exist_ok=True)
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    safetensors.torch.save_file(TENSORS if tensors is None else tensors, adapter / "adapter_model.safetensors")
    return adapter


def loaded(folder: Path, adapter: Path, **around: Any) -> Any:
    load = importlib.import_module("worker.execution.models.checkpoint").load
    source = DirectoryModel(source="directory", path=str(folder), adapter=str(adapter))
    return load(source, Task(type="causal_lm"), LoaderContext(store=folder, **around)).model


def refused(folder: Path, adapter: Path, **around: Any) -> Refusal:
    with pytest.raises(Refusal) as found:
        loaded(folder, adapter, **around)
    assert found.value.pointer == "/model/adapter"
    return found.value


def test_no_field_of_a_configuration_acts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = loaded(model, written(model)).state_dict()
    (model.parent / "kronoscope_attack.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(model.parent))
    (model.parent / "factors.pkl").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    hostile = {
        "megatron_core": "kronoscope_attack",
        "auto_mapping": {"base_model_class": "Attack", "parent_library": "kronoscope_attack"},
        "target_modules": "(([a-z])+.)+[A-Z]([a-z])+$",
        "exclude_modules": "(a|a)*$",
        "corda_config": {"cache_file": str(model.parent / "factors.pkl"), "covariance_file": "factors.pkl"},
        "base_model_name_or_path": "http://127.0.0.1:9/model",
        "rank_pattern": {"(a+)+$": 2},
        "revision": "../../etc",
    }
    notices: list[str] = []
    began = time.monotonic()
    after = loaded(model, written(model, **hostile), note=notices.append).state_dict()
    assert time.monotonic() - began < 10
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert "kronoscope_attack" not in sys.modules
    assert "names the base `http://127.0.0.1:9/model`, which is not followed" in notices[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, r"`peft_type` is 'LOHA'.*merge it into the weights"),
        ({"peft_type": "ADALORA"}, "merge_and_unload"),
        ({"peft_type": None}, "`peft_type` is missing"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base"),
        ({"init_lora_weights": "corda"}, "changes the base"),
        ({"init_lora_weights": "olora"}, "changes the base"),
        ({"init_lora_weights": "mica"}, "freezes a part"),
        ({"megatron_config": {"a": 1}}, "`megatron_config` is set"),
        ({"layer_replication": [[0, 1]]}, "`layer_replication` is set"),
        ({"trainable_token_indices": [1]}, "`trainable_token_indices` is set"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "`target_parameters` is set"),
        ({"alora_invocation_tokens": [1]}, "`alora_invocation_tokens` is set"),
        ({"monteclora_config": {"num_samples": 8}}, "`monteclora_config` is set"),
        ({"kasa_config": {}, "arrow_config": {"x": 1}}, "`arrow_config` is set"),
        ({"use_qalora": True}, "`use_qalora` is set"),
        ({"ensure_weight_tying": True}, "`ensure_weight_tying` is set"),
        ({"use_newlora": True}, "`use_newlora` is set and not known"),
        ({"r": 3}, "has matrices of rank 2, and adapter_config.json says 3"),
        ({"r": 0}, "`r` must be an integer from 1"),
        ({"r": 2.0}, "`r` must be an integer"),
        ({"r": 10**400}, "`r` must be an integer"),
        ({"lora_alpha": "4"}, "`lora_alpha` must be a number"),
        ({"lora_alpha": 1e300}, "`lora_alpha` must be a number"),
        ({"alpha_pattern": {"(a|a)*c_attn": 4}}, "a regular expression, which is not evaluated"),
        ({"alpha_pattern": {f"m{n}": 1 for n in range(1_001)}}, "`alpha_pattern` must be an object of at most 1,000"),
        ({"modules_to_save": ["m"] * 1_001}, "`modules_to_save` must be a list of at most 1,000 names"),
        ({"alpha_pattern": {"c_attn": None}}, "`alpha_pattern` must be a number"),
        ({"alpha_pattern": ["c_attn"]}, "`alpha_pattern` must be an object"),
        ({"bias": "some"}, "`bias` must be none, all or lora_only"),
        ({"use_dora": 1}, "`use_dora` must be true or false"),
        ({"use_dora": True}, "ask for `lora_A`, `lora_B`, `lora_magnitude_vector`"),
        ({"lora_bias": True}, "ask for `lora_A`, `lora_B`, `lora_B.bias`"),
        ({"modules_to_save": "lm_head"}, "`modules_to_save` must be a list"),
        ({"modules_to_save": ["ln_f"]}, "the file lacks 2 tensors: `transformer.ln_f.weight`"),
        ({"modules_to_save": ["attn"]}, "are adapted, and trained as a whole|the file lacks"),
    ],
)  # fmt: skip
def test_what_is_not_applied_is_refused_by_its_name(model: Path, changes: dict[str, Any], said: str) -> None:
    assert re.search(said, refused(model, written(model, **changes)).message)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"{PAIR}A.weight": torch.ones(2, 16)}, "has `lora_A` in the file"),
        ({f"{PAIR}B.weight": torch.ones(48, 2)}, "matrices of rank 0"),
        (TENSORS | {f"{PAIR}B.weight": torch.ones(2, 48)}, r"is \[2, 48\] where the model has \[48, 2\]"),
        (TENSORS | {f"{PAIR}A.weight": torch.ones(16)}, "matrices of rank 16"),
        (TENSORS | {f"{PAIR}A.weight": torch.ones(2, 16, dtype=torch.int8)}, "is I8, and the model has"),
        (TENSORS | {f"{PAIR}A.weight": torch.full((2, 16), torch.nan)}, "NaN or Inf"),
        (TENSORS | {f"{PAIR}A.other.weight": torch.ones(2, 16)}, "not a part of one LoRA adapter"),
        ({name.replace("h.0", "h.7"): each for name, each in TENSORS.items()}, "belongs to another base"),
        ({name.replace("attn.c_attn", "ln_1"): each for name, each in TENSORS.items()}, "a LayerNorm, is not applied"),
        (TENSORS | {"base_model.model.transformer.wte.weight": torch.ones(61, 16)}, r"\[61, 16\] where the model has"),
        (TENSORS | {"base_model.model.transformer.xyz.weight": torch.ones(3)}, "parts that the model does not have"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(model: Path, tensors: dict[str, torch.Tensor], said: str) -> None:
    assert re.search(said, refused(model, written(model, tensors)).message)


def test_a_file_that_declares_more_than_the_job_may_hold_is_refused_before_it_is_read(model: Path) -> None:
    adapter = written(model)
    size = 2**33
    header = json.dumps({
        f"{PAIR}A.weight": {"dtype": "F32", "shape": [2, size // 8], "data_offsets": [0, size]},
    }).encode()  # fmt: skip
    with (adapter / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    with pytest.raises(Refusal, match="memory are left to this job"):
        loaded(model, adapter, most_bytes=2**30)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": NaN}', '{"r": 1, "r": 2}', "[" * 100_000, "\xff" * 2**21])
def test_a_configuration_that_is_not_one_is_refused(model: Path, text: str) -> None:
    adapter = written(model)
    (adapter / "adapter_config.json").write_text(text)
    refused(model, adapter)


def test_what_lies_beside_an_adapter_is_listed_and_a_module_that_the_file_lacks_is_said(model: Path) -> None:
    adapter = written(model, target_modules=["c_attn", "c_fc"])
    (adapter / "tokenizer.json").write_text("{}")
    (adapter / "README.md").write_text("")
    unused: list[str] = []
    noted: list[str] = []
    loaded(model, adapter, unused=unused.append, note=noted.append)
    assert [each for each in unused if "adapter" in each] == ["file `adapter/tokenizer.json` of the adapter"]
    assert any("no tensors for, and they are not adapted: `transformer.h.0.mlp.c_fc`" in each for each in noted)


def test_only_safetensors_are_read_and_the_line_that_is_said_converts(model: Path) -> None:
    adapter = written(model)
    truth = loaded(model, adapter).state_dict()
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(TENSORS, adapter / "adapter_model.bin")
    _run(refused(model, adapter).message, adapter)
    state = safetensors.torch.load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(dict(list(state.items())[:3]), model / "pytorch_model-00001-of-00002.bin")
    torch.save(dict(list(state.items())[3:]), model / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(Refusal, match="may hold code, and is never read") as found:
        loaded(model, adapter)
    _run(found.value.message, model)
    after = loaded(model, adapter).state_dict()
    assert all(torch.equal(truth[name], tensor) for name, tensor in after.items())


def _run(message: str, folder: Path) -> None:
    """Run the line of a refusal in a folder, as its reader would."""
    (code,) = re.findall(r'python -c "(.*)"', message)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
