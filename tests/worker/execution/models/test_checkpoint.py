import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from catalog.requests.inputs import DirectoryModel, HuggingFaceModel, Task
from worker.execution.loader_context import LoaderContext
from worker.execution.models import huggingface
from worker.execution.models.checkpoint import load
from worker.execution.refusal import Refusal

D = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 60}
KV = D | {"num_key_value_heads": 1}

CONFIGS = {
    "bert": lambda: transformers.BertConfig(**D, max_position_embeddings=24),
    "roberta": lambda: transformers.RobertaConfig(**D, max_position_embeddings=24),
    "distilbert": lambda: transformers.DistilBertConfig(
        dim=16, n_layers=2, n_heads=2, hidden_dim=32, vocab_size=60, max_position_embeddings=24
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=60, n_positions=24, bos_token_id=0, eos_token_id=0, pad_token_id=0
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**D, max_position_embeddings=24),
    "opt": lambda: transformers.OPTConfig(
        **{k: v for k, v in D.items() if k != "intermediate_size"},
        ffn_dim=32, word_embed_proj_dim=16, max_position_embeddings=24,
    ),
    "llama": lambda: transformers.LlamaConfig(**KV, max_position_embeddings=24),
    "mistral": lambda: transformers.MistralConfig(**KV, max_position_embeddings=24),
    "qwen2": lambda: transformers.Qwen2Config(**KV, max_position_embeddings=24),
    "vit": lambda: transformers.ViTConfig(
        **{k: v for k, v in D.items() if k != "vocab_size"}, image_size=8, patch_size=4, num_channels=1
    ),
    "mixtral": lambda: transformers.MixtralConfig(**KV, max_position_embeddings=24, num_local_experts=2),
    "resnet": lambda: transformers.ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    ),
}  # fmt: skip
LANGUAGE = ["gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "mixtral"]
MASKED = ["bert", "roberta", "distilbert"]
IMAGES = ["vit", "resnet"]
CASES = (
    [(family, "AutoModelForCausalLM", "causal_lm") for family in LANGUAGE]
    + [(family, "AutoModelForMaskedLM", "masked_lm") for family in MASKED]
    + [(family, "AutoModelForSequenceClassification", "sequence_classification") for family in [*MASKED, *LANGUAGE]]
    + [(family, "AutoModelForImageClassification", "classification") for family in IMAGES]
    + [(family, "AutoModel", "sentence_embedding") for family in [*MASKED, "gpt2", "llama"]]
)


def loaded_from(folder: Path, task: str = "sentence_embedding", **around: Any) -> Any:
    context = LoaderContext(store=folder / "store", **around)
    return load(DirectoryModel(source="directory", path=str(folder)), Task(type=task), context)


def rewrite(folder: Path, **changes: Any) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors_of(folder: Path) -> Any:
    return safetensors.torch.load_file(folder / "model.safetensors")


def inputs_for(family: str) -> Any:
    if family in IMAGES:
        return {"pixel_values": torch.linspace(0, 1, 128).view(2, 1, 8, 8)}
    ids = torch.arange(2, 14).view(2, 6)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(("family", "auto", "task"), CASES)
def test_what_was_saved_is_what_is_loaded(saved: Callable[..., Path], family: str, auto: str, task: str) -> None:
    config = CONFIGS[family]()
    folder = saved(auto, config)
    reference = getattr(transformers, auto).from_pretrained(folder).eval()
    loaded = loaded_from(folder, task)
    if getattr(config, "pad_token_id", None) is None:
        reference.config.pad_token_id = 0
    with torch.no_grad():
        expected = reference(**inputs_for(family))[0]
        found = loaded.model(**inputs_for(family))[0]
    torch.testing.assert_close(found, expected)
    assert not loaded.model.training


@pytest.mark.parametrize("family", ["bert", "gpt2", "distilbert"])
def test_position_embeddings_are_looked_up_per_example(saved: Callable[..., Path], family: str) -> None:
    loaded = loaded_from(saved("AutoModel", CONFIGS[family]()))
    assert loaded.vocabulary.explicit_positions
    assert "position_ids" in loaded.vocabulary.arguments


def test_classes_without_names_are_counted(saved: Callable[..., Path]) -> None:
    """Two are the default, which no file writes; labels of a text are held against them."""
    folder = saved("AutoModelForSequenceClassification", CONFIGS["bert"]())
    assert "id2label" not in json.loads((folder / "config.json").read_text())
    assert loaded_from(folder, "sequence_classification").class_names == ("LABEL_0", "LABEL_1")


def test_the_original_names_of_a_vision_transformer_are_understood(saved: Callable[..., Path]) -> None:
    folder = saved("AutoModelForImageClassification", CONFIGS["vit"]())
    names = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
    older = {}
    for name, tensor in tensors_of(folder).items():
        changed = name.replace("vit.layers.", "vit.encoder.layer.").replace(
            "attention.o_proj", "attention.output.dense"
        )
        changed = changed.replace("mlp.fc1", "intermediate.dense").replace("mlp.fc2", "output.dense")
        for new, old in names.items():
            changed = changed.replace(f"attention.{new}", f"attention.{old}")
        older[changed] = tensor
    before = loaded_from(folder, "classification").model.state_dict()
    safetensors.torch.save_file(older, folder / "model.safetensors")
    after = loaded_from(folder, "classification").model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_head_that_the_task_does_not_use_is_left_out_and_said(saved: Callable[..., Path]) -> None:
    folder = saved("AutoModelForMaskedLM", CONFIGS["bert"]())
    said = []
    loaded = loaded_from(folder, log=lambda level, message: said.append((level, message)))
    assert any("cls.predictions" in message for _, message in said)
    assert loaded.model.pooler is None  # the checkpoint has none, and the task needs none


def test_a_head_that_the_task_needs_and_is_not_there_is_an_error_that_names_it(saved: Callable[..., Path]) -> None:
    with pytest.raises(Refusal, match=r"classifier\.weight.*needs that head") as refused:
        loaded_from(saved("AutoModel", CONFIGS["bert"]()), "sequence_classification")
    assert refused.value.code == "missing_head"
    assert refused.value.pointer == "/model/path"


def test_legacy_names_are_mapped_and_a_strange_tensor_is_named(saved: Callable[..., Path]) -> None:
    folder = saved("AutoModel", CONFIGS["bert"]())
    tensors = tensors_of(folder)
    legacy = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
              for n, t in tensors.items()}  # fmt: skip
    safetensors.torch.save_file(
        {f"bert.{name}": tensor for name, tensor in legacy.items()}, folder / "model.safetensors"
    )
    loaded = loaded_from(folder)
    assert torch.equal(loaded.model.embeddings.LayerNorm.weight, tensors["embeddings.LayerNorm.weight"])
    safetensors.torch.save_file(tensors | {"surprise": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(Refusal, match="`surprise`"):
        loaded_from(folder)


def test_experts_are_joined_as_transformers_joins_them_and_one_that_is_missing_is_named(
    saved: Callable[..., Path],
) -> None:
    folder = saved("AutoModelForCausalLM", CONFIGS["mixtral"]())
    said: list[str] = []
    loaded = loaded_from(folder, "causal_lm", log=lambda _, message: said.append(message))
    tensors, layer = tensors_of(folder), loaded.model.model.layers[1].mlp.experts
    names = [f"model.layers.1.block_sparse_moe.experts.1.{name}.weight" for name in ("w1", "w3", "w2")]
    assert torch.equal(layer.gate_up_proj[1], torch.cat([tensors[names[0]], tensors[names[1]]]))
    assert torch.equal(layer.down_proj[1], tensors[names[2]])
    assert any("are read as transformers converts them" in message for message in said)
    safetensors.torch.save_file(
        {f"module.{name}": each for name, each in tensors.items()}, folder / "model.safetensors"
    )
    wrapped = loaded_from(folder, "causal_lm").model.state_dict()
    assert all(torch.equal(wrapped[name], each) for name, each in loaded.model.state_dict().items())
    safetensors.torch.save_file({k: t for k, t in tensors.items() if k != names[2]}, folder / "model.safetensors")
    with pytest.raises(Refusal, match=r"`model\.layers\.1\.mlp\.experts\.down_proj` is \[1, 16, 32\]"):
        loaded_from(folder, "causal_lm")
    whole = "model.layers.1.mlp.experts.down_proj"
    safetensors.torch.save_file(tensors | {whole: torch.zeros(2, 16, 32)}, folder / "model.safetensors")
    with pytest.raises(Refusal, match=rf"`{re.escape(whole)}` and .* are the same tensor"):
        loaded_from(folder, "causal_lm")
    integers = {name: tensor.to(torch.int8) if "experts" in name else tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(integers, folder / "model.safetensors")
    with pytest.raises(Refusal, match="I8"):
        loaded_from(folder, "causal_lm")
    tensors[names[1]] = torch.zeros(3, 3)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Refusal, match="cannot be put together"):
        loaded_from(folder, "causal_lm")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(saved: Callable[..., Path], value: Any) -> None:
    folder = saved("AutoModel", CONFIGS["bert"]())
    tensors = tensors_of(folder)
    tensors["encoder.layer.1.output.dense.weight"][0, 0] = value
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Refusal, match=r"encoder\.layer\.1\.output\.dense\.weight.*NaN or Inf") as refused:
        loaded_from(folder)
    assert refused.value.code == "non_finite_model"


def test_missing_and_misshapen_tensors_are_named(saved: Callable[..., Path]) -> None:
    folder = saved("AutoModel", CONFIGS["bert"]())
    tensors = tensors_of(folder)
    key = tensors.pop("encoder.layer.0.attention.self.key.weight")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Refusal, match=r"attention\.self\.key\.weight"):
        loaded_from(folder)
    tensors["encoder.layer.0.attention.self.key.weight"] = key.flatten()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Refusal, match=r"is \[256\] where config.json says \[16, 16\]"):
        loaded_from(folder)


def test_shards_are_read_and_a_foreign_shard_is_refused(saved: Callable[..., Path]) -> None:
    folder = saved("AutoModel", CONFIGS["bert"]())
    tensors = tensors_of(folder)
    before = loaded_from(folder).model.state_dict()
    names = sorted(tensors)
    places = {name: f"parts/model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    places |= dict.fromkeys(names[:3], "model-00003.safetensors")
    (folder / "parts").mkdir()
    for shard in set(places.values()):
        safetensors.torch.save_file({n: tensors[n] for n in names if places[n] == shard}, folder / shard)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    said: list[str] = []
    unused: list[str] = []
    noted: list[str] = []
    log = {"log": lambda _, message: said.append(message), "unused": unused.append, "note": noted.append}
    after = loaded_from(folder, **log).model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(
        "2 files of weights lie in folders below: `parts/model-00001-of-00002.safetensors`" in each for each in said
    )
    assert not [each for each in unused if each.startswith("file ")]
    assert noted == []
    strange = ("/etc/passwd.safetensors", "parts/../../x.safetensors", ".hidden/x.safetensors", "a//b.safetensors")
    for foreign in ("../../etc/passwd.safetensors", "missing.safetensors", *strange):
        index.write_text(json.dumps({"weight_map": places | {names[0]: foreign}}))
        with pytest.raises(Refusal):
            loaded_from(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 10**9}, "`hidden_size` is 1,000,000,000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 1000}, "belong to different models"),
        ({"vocab_size": 10**9}, "vocab_size"),
        ({"num_labels": 10**9, "id2label": None}, "num_labels"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": -8}, "num_attention_heads"),
        ({"num_attention_heads": 3}, "does not divide"),
        ({"hidden_size": "16"}, "must be an integer"),
        ({"hidden_size": 16.0}, "must be an integer"),
        ({"hidden_size": True}, "must be an integer"),
        ({"hidden_size": 8}, "another shape"),
        ({"model_type": "evil"}, "`model_type` is 'evil'"),
        ({"model_type": None}, "`model_type` is missing"),
        ({"hidden_act": "someone/kernel"}, "`hidden_act` is not one of"),
        ({"layer_norm_eps": "0"}, "`layer_norm_eps` must be a number"),
        ({"layer_norm_eps": 10**400}, "`layer_norm_eps` must be a number"),
        ({"layer_norm_eps": ["0"]}, "`layer_norm_eps` must be a number"),
        ({"model_type": ["bert"]}, "`model_type` is missing"),
        ({"hidden_act": ["gelu"]}, "`hidden_act` is not one of"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_an_absurd_config_is_refused_before_anything_is_built(
    saved: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    folder = saved("AutoModel", CONFIGS["bert"]())
    rewrite(folder, **changes)
    with pytest.raises(Refusal) as refused:
        loaded_from(folder)
    assert said in refused.value.message
    assert refused.value.pointer == "/model/path"


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": ["linear"], "factor": 2}, "unknown type"),
        ({"rope_type": "linear", "factor": 10**400}, "`factor` must be a number"),
        ({"rope_type": "linear", "factor": 2, "rope_theta": 10**400}, "`rope_theta` must be a number"),
        ({"rope_type": "linear", "factor": [2]}, "`factor` must be a number"),
    ],
)
def test_rotary_parameters_that_cannot_be_are_refused(
    saved: Callable[..., Path], scaling: dict[str, Any], said: str
) -> None:
    folder = saved("AutoModel", CONFIGS["llama"]())
    rewrite(folder, rope_scaling=scaling, rope_parameters=None)
    with pytest.raises(Refusal, match=said):
        loaded_from(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"auto_map": {"AutoModel": "evil--code.Model"}}, "`auto_map` names code"),
        ({"attn_implementation": "someone/kernel"}, "fetched or imported"),
        ({"_attn_implementation": "someone/kernel"}, "fetched or imported"),
        ({"experts_implementation": ["someone/kernel"]}, "fetched or imported"),
        ({"backbone": "resnet50"}, "`backbone` is set"),
        ({"use_timm_backbone": True}, "`use_timm_backbone` is set"),
        ({"backbone_config": {"model_type": "resnet"}}, "`backbone_config` is set"),
        ({"mine": [[[[1]]]]}, "more than 4 deep"),
        ({"mine": "x" * 2**20}, "at most 1,048,576 are read"),
    ],
)
def test_what_would_fetch_or_import_in_a_config_is_refused(
    saved: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    folder = saved("AutoModel", CONFIGS["bert"]())
    rewrite(folder, **changes)
    with pytest.raises(Refusal) as refused:
        loaded_from(folder)
    assert said in refused.value.message


def test_foreign_names_in_a_config_have_no_effect(saved: Callable[..., Path]) -> None:
    folder = saved("AutoModel", CONFIGS["bert"]())
    before = loaded_from(folder).model.state_dict()
    rewrite(
        folder,
        trust_remote_code=True,
        _attn_implementation="flash_attention_2",
        _name_or_path="/etc/passwd",
        name_or_path="/etc/passwd",
    )
    model = loaded_from(folder).model
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert "passwd" not in str(model.config)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": NaN}', "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(saved: Callable[..., Path], text: str) -> None:
    folder = saved("AutoModel", CONFIGS["bert"]())
    (folder / "config.json").write_text(text)
    with pytest.raises(Refusal, match=r"config\.json"):
        loaded_from(folder)


def test_a_task_that_the_family_does_not_do_is_refused(saved: Callable[..., Path]) -> None:
    with pytest.raises(Refusal, match="does not do `causal_lm`") as refused:
        loaded_from(saved("AutoModel", CONFIGS["bert"]()), "causal_lm")
    assert refused.value.pointer == "/task/type"


def test_weights_that_may_hold_code_are_never_read(saved: Callable[..., Path]) -> None:
    folder = saved("AutoModel", CONFIGS["bert"]())
    torch.save(tensors_of(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(Refusal, match=r"pytorch_model\.bin.*save the model as safetensors"):
        loaded_from(folder)
    shutil.move(folder / "pytorch_model.bin", folder / "model.safetensors")
    with pytest.raises(Refusal, match="zip archive"):
        loaded_from(folder)


def test_a_folder_outside_what_the_operator_lists_is_refused_alike_whether_it_exists(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved("AutoModel", CONFIGS["bert"]())
    messages = set()
    for path in (folder, tmp_path / "nothing"):
        context = LoaderContext(store=tmp_path, directories=(str(tmp_path / "listed"),))
        with pytest.raises(Refusal) as refused:
            load(DirectoryModel(source="directory", path=str(path)), Task(type="sentence_embedding"), context)
        messages.add(refused.value.message)
    assert len(messages) == 1
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / "link").symlink_to(folder)
    context = LoaderContext(store=tmp_path, directories=(str(tmp_path / "listed"),))
    with pytest.raises(Refusal, match="outside the folders"):
        load(
            DirectoryModel(source="directory", path=str(tmp_path / "listed" / "link")),
            Task(type="sentence_embedding"),
            context,
        )


def test_a_model_of_the_hub_is_read_from_the_store_at_its_commit(saved: Callable[..., Path], tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub = tmp_path / "store" / "hub" / "models--someone--something"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text(commit)
    (hub / "snapshots").mkdir()
    shutil.copytree(saved("AutoModel", CONFIGS["bert"]()), hub / "snapshots" / commit)
    said: list[str] = []
    context = LoaderContext(store=tmp_path / "store", log=lambda _, message: said.append(message))
    task = Task(type="sentence_embedding")
    here = HuggingFaceModel(source="huggingface", id="someone/something")
    assert huggingface.load(here, task, context).vocabulary is not None
    assert said[0] == f"someone/something at commit {commit}"
    with pytest.raises(Refusal, match="not in the model store") as refused:
        huggingface.load(HuggingFaceModel(source="huggingface", id="someone/else"), task, context)
    assert refused.value.code == "not_fetched"
    assert refused.value.pointer == "/model/id"
    for strange in ("../../etc", "a/b/c", "", "a b"):
        with pytest.raises(Refusal, match="not a model id"):
            huggingface.load(HuggingFaceModel(source="huggingface", id=strange), task, context)


def test_the_real_encoder_gives_the_outputs_that_transformers_gives(minilm: Path) -> None:
    loaded = loaded_from(minilm)
    reference = transformers.BertModel.from_pretrained(minilm).eval()
    ids = torch.tensor([[101, 7592, 2088, 102], [101, 2023, 2003, 102]])
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        positions = torch.arange(4).expand(2, 4)
        found = loaded.model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions)
    torch.testing.assert_close(found.last_hidden_state, expected)
    assert loaded.vocabulary.mask_token == "[MASK]"
    assert loaded.vocabulary.max_length == 512
