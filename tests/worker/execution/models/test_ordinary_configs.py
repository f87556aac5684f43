"""Fields of checkpoints as the hub has them, by which a model computes otherwise: read as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from catalog.requests.inputs import DirectoryModel, Task
from worker.execution.loader_context import LoaderContext
from worker.execution.models.checkpoint import load
from worker.execution.models.unsaved_state import unsaved_numbers, unsaved_state
from worker.execution.refusal import Refusal

D = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60}
KV = {**D, "num_key_value_heads": 1, "max_position_embeddings": 64, "torch_dtype": "bfloat16"}
GEMMA = {**KV, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2}
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 60, "max_position_embeddings": 64,
}  # fmt: skip
TEXT = {**D, "max_position_embeddings": 64, "eos_token_id": 2}
VISION = {**D, "image_size": 8, "patch_size": 4}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "scaling of the global layers alone": (
        "causal_lm", "AutoModelForCausalLM", {**GEMMA, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    ),
    "both spellings": (
        "causal_lm", "AutoModelForCausalLM",
        {**KV, "model_type": "llama", "rope_scaling": {"factor": 4.0, "type": "linear"},
         "rope_parameters": {"rope_type": "default", "rope_theta": 99.0}},
    ),
    "attention in both directions": (
        "sentence_embedding", "AutoModel", {**KV, "model_type": "qwen2", "is_causal": False},
    ),
    "positions in one string": (
        "sentence_embedding", "AutoModel",
        {**D, "model_type": "deberta-v2", "relative_attention": True, "position_buckets": 8, "type_vocab_size": 0,
         "pos_att_type": "p2c|c2p", "share_att_key": True, "position_biased_input": False},
    ),
    "embeddings scaled for masks": (
        "masked_lm", "AutoModelForMaskedLM",
        {**D, "model_type": "esm", "token_dropout": True, "mask_token_id": 32, "pad_token_id": 1,
         "position_embedding_type": "rotary", "emb_layer_norm_before": False, "max_position_embeddings": 66},
    ),
    "experts scaled for dropout": (
        "embedding", "AutoModel",
        {**BART, "model_type": "nllb-moe", "num_experts": 2, "expert_capacity": 64, "encoder_sparse_step": 1,
         "moe_token_dropout": 0.4},
    ),
    "features scaled for dropout": (
        "classification", "AutoModelForImageClassification",
        {"model_type": "pp_lcnet", "scale": 0.125, "class_expand": 16, "hidden_dropout_prob": 0.4},
    ),
    "a part by its older name": (
        "embedding", "AutoModel",
        {"model_type": "clip", "text_config": TEXT, "text_config_dict": {**TEXT, "hidden_act": "gelu"},
         "vision_config": VISION, "vision_config_dict": None, "projection_dim": 8},
    ),
}  # fmt: skip


def written(folder: Path, auto: str, config: dict[str, Any]) -> Path:
    """Save weights, beside the configuration as it stands and not as transformers would write it."""
    torch.manual_seed(0)
    described = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    getattr(transformers, auto).from_config(described).to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path, task: Any, **around: Any) -> Any:
    source = DirectoryModel(source="directory", path=str(folder))
    return load(source, Task(type=task), LoaderContext(store=folder / "store", **around)).model


def inputs_for(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 27).view(2, 12)
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": images}
    texts = {"input_ids": ids, "attention_mask": (torch.arange(12) < torch.tensor([[12], [9]])).long()}
    if model.config.model_type == "clip":
        return {**texts, "pixel_values": images[..., :8, :8]}
    return {**texts, "decoder_input_ids": ids[:, :2]} if model.config.is_encoder_decoder else texts


@pytest.mark.parametrize(("task", "auto", "config"), CONFIGS.values(), ids=CONFIGS)
def test_outputs_are_those_of_transformers(task: str, auto: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path, auto, config)
    expected = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()
    found = loaded(folder, task)
    inputs = inputs_for(expected)
    with torch.no_grad():
        torch.testing.assert_close(found(**inputs)[0], expected(**inputs)[0], rtol=1e-6, atol=1e-6)


def test_the_kind_of_problem_goes_on_to_the_models_own_loss(tmp_path: Path) -> None:
    config = {**D, "model_type": "bert", "id2label": {"0": "a", "1": "b"}, "problem_type": "regression"}
    folder = written(tmp_path, "AutoModelForSequenceClassification", config)
    assert loaded(folder, "sequence_classification").config.problem_type == "regression"


def test_an_object_that_the_class_makes_other_fields_of_is_refused(tmp_path: Path) -> None:
    config = {**KV, "model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1], "head_dim": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refusal, match="linear_attn_config") as refused:
        loaded(tmp_path, "causal_lm", shapes_only=True)
    assert refused.value.code == "unread_field"


T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 60}
BERTS = {**D, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("auto", "config", "task", "more"),
    [
        ("AutoModelForSeq2SeqLM", T5, "sentence_embedding", ()),
        ("AutoModelForMaskedLM", {**BERTS, "model_type": "modernbert", "pad_token_id": 0}, "sentence_embedding", ()),
        ("AutoModelForPreTraining", {**BERTS, "model_type": "electra"}, "sentence_embedding", ()),
        ("AutoModelForPreTraining", {**BERTS, "model_type": "albert"}, "masked_lm", ()),
        (
            "AutoModel", {"model_type": "swin", "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1],
                          "num_heads": [1], "window_size": 2},
            "embedding", ("encoder.layers.0.blocks.0.attention.self.relative_position_index",),
        ),
    ],
    ids=lambda each: each.get("model_type") if isinstance(each, dict) else "",
)  # fmt: skip
def test_what_another_task_needs_of_a_checkpoint_is_left_out(
    auto: str, config: dict[str, Any], task: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    folder = written(tmp_path, auto, {**config, "torch_dtype": "float32"})
    held = safetensors.torch.load_file(folder / "model.safetensors")
    held.update({name: torch.zeros(4, 4, dtype=torch.int64) for name in more})
    safetensors.torch.save_file(held, folder / "model.safetensors")
    unused: list[str] = []
    model = loaded(folder, task, unused=unused.append)
    reference = type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
    assert any(line.startswith("tensor ") for line in unused)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, reference[name], rtol=0, atol=0)


def test_layers_beyond_those_of_the_config_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "AutoModel", {**BERTS, "model_type": "bert"})
    (folder / "config.json").write_text(json.dumps({**BERTS, "model_type": "bert", "num_hidden_layers": 1}))
    with pytest.raises(Refusal, match=r"encoder\.layer\.1") as refused:
        loaded(folder, "sentence_embedding")
    assert refused.value.code == "unexpected_tensor"


TROCR = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 60}


@pytest.mark.parametrize(("name", "config"), [("bart", BART), ("trocr", TROCR)], ids=["bart", "trocr"])
def test_a_decoder_that_was_saved_says_that_it_is_one(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **config)).eval()
    reference.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["is_decoder"] is True
    unused: list[str] = []
    found = loaded(tmp_path, "causal_lm", unused=unused.append)
    assert "config.json: `is_decoder`" in unused
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=ids)[0], reference(input_ids=ids)[0], rtol=1e-6, atol=1e-6)


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    """The encoder of a T5 reads `is_decoder`, and would hide later tokens."""
    folder = written(tmp_path, "AutoModelForTextEncoding", {**T5, "is_decoder": True})
    with pytest.raises(Refusal, match=r"`is_decoder` \(True, and False here\)"):
        loaded(folder, "sentence_embedding")


def test_experts_that_an_older_version_laid_the_other_way_round_are_turned(tmp_path: Path) -> None:
    text = {**KV, "moe_intermediate_size": 24, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    vision = {"hidden_size": 16, "intermediate_size": 32, "depth": 1, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    described = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": vision}
    folder = written(tmp_path, "AutoModel", described)
    held = safetensors.torch.load_file(folder / "model.safetensors")
    turned = {name: each.mT.contiguous() if ".experts." in name else each for name, each in held.items()}
    assert any(turned[name].shape != each.shape for name, each in held.items())
    safetensors.torch.save_file(turned, folder / "model.safetensors", {"format": "pt"})
    expected = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).state_dict()
    found = loaded(folder, "embedding").state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


MARIAN = {**BART, "decoder_vocab_size": 60, "pad_token_id": 1, "decoder_start_token_id": 1}


@pytest.mark.parametrize(
    ("saved", "config", "task", "auto", "missing"),
    [
        ("MarianMTModel", MARIAN, "embedding", "AutoModel",
         {"encoder.embed_positions.weight", "decoder.embed_positions.weight"}),
        ("MarianForCausalLM", MARIAN, "causal_lm", "AutoModelForCausalLM", {"model.decoder.embed_positions.weight"}),
        ("BartModel", BART, "masked_lm", "AutoModelForMaskedLM", {"final_logits_bias"}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_what_a_class_makes_by_itself_may_be_missing(
    saved: str, config: dict[str, Any], task: str, auto: str, missing: set[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, saved)
    kind(kind.config_class(**config)).save_pretrained(tmp_path)
    held = safetensors.torch.load_file(tmp_path / "model.safetensors")
    held = {name: each for name, each in held.items() if not name.endswith("embed_positions.weight") or "Bart" in saved}
    safetensors.torch.save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    lines: list[str] = []
    found = loaded(tmp_path, task, log=lambda _, message: lines.append(message)).state_dict()
    expected = getattr(transformers, auto).from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    said = next(line for line in lines if "always alike" in line)
    assert {name for name in found if f"`{name}`" in said} == missing


@pytest.mark.parametrize("pattern", ["weight", "drawn"])
def test_what_is_trained_or_drawn_may_not_be_missing(pattern: str) -> None:
    """A list that names it changes nothing."""
    model = nn.Linear(3, 2)
    model.register_buffer("drawn", torch.ones(2))
    model.register_buffer("zeros", torch.zeros(2))
    model._keys_to_ignore_on_load_missing = [pattern, "zeros"]  # type: ignore[assignment] # as a class has it
    model.requires_grad_(requires_grad=False)
    assert unsaved_state(model) == {"zeros"}
    assert unsaved_numbers(model) == 0


def test_positions_that_are_trained_may_not_be_missing() -> None:
    model = transformers.MarianModel(transformers.MarianConfig(**MARIAN))
    tables = {"encoder.embed_positions.weight", "decoder.embed_positions.weight"}
    assert unsaved_state(model) == tables
    assert unsaved_numbers(model) == 2 * 64 * 16
    model.encoder.embed_positions.requires_grad_()
    assert unsaved_state(model) == {"decoder.embed_positions.weight"}
    with torch.no_grad():
        model.decoder.embed_positions.weight[3, 3] += 1e-3
    assert unsaved_state(model) == frozenset()
