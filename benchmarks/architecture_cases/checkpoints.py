"""Tiny checkpoints of transformers, read as a service reads them: by a job document, from a folder of files.

A model of random weights is saved, with data beside it in a safetensors file. The child's own loaders read both, by a
document with ``source: directory`` and ``source: file``; the oracle reads the folder with ``from_pretrained``.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.architecture_cases.case import EXAMPLES, Case, enlivened, normal, tokens, trainable, widened
from benchmarks.architecture_cases.judgement import collected, judgement
from benchmarks.architecture_cases.language import GROUPED, SEQUENCE, SMALL, T
from benchmarks.architecture_cases.oracle import truth
from catalog.requests.inputs import EMBEDDINGS
from engine.errors import EngineError
from jobs.codec import parse_document
from worker.execution.job_inputs import load_data, load_model
from worker.execution.loader_context import LoaderContext
from worker.execution.models.architectures.model_types import model_types
from worker.execution.refusal import Refusal

Inputs = Callable[[], dict[str, Tensor]]
CLASSES = 3
_VOCABULARY = 31


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint of the table."""

    task: str
    fields: Mapping[str, Any]
    """Fields of the configuration."""
    inputs: Inputs = field(default=lambda: {"input_ids": tokens(EXAMPLES, T)})


def judged(model_type: str, case: Checkpoint) -> dict[str, Any]:
    """Return one row of the table: what a service makes of the checkpoint, against the oracle."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        try:
            inputs, targets = saved(model_type, case, Path(name))
            reference = _reference(model_type, case, Path(name))
            case_of = Case(model=reference, inputs=inputs, targets=targets, task=case.task, padded=lambda _: False)
            with widened():
                expected = truth(case_of)
        except Exception as error:  # noqa: BLE001 - a case that this version of the package cannot build
            return {"verdict": "no case", "message": f"{type(error).__name__}: {str(error)[:300]}"}
        started = time.perf_counter()
        try:
            model, batches = loaded(Path(name), case.task)
            numbers = sum(each.numel() for each in {id(each): each for each in trainable(model).values()}.values())
            fisher = "type2" if case.task in EMBEDDINGS else "empirical"
            with widened():
                whole = collected(model, batches, case.task, fisher=fisher)
                row = judgement(case_of, whole, expected, numbers)
        except (EngineError, Refusal) as error:
            row = {"verdict": "refused", "message": f"{type(error).__name__}: {error}"}
        except Exception as error:  # noqa: BLE001 - a crash is a row of the table
            row = {"verdict": "crashed", "message": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"task": case.task, **row, "seconds": round(time.perf_counter() - started, 1)}


def saved(model_type: str, case: Checkpoint, folder: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Save a model of random weights and its data, and return the data."""
    config = CONFIG_MAPPING[model_type](**case.fields)
    auto = getattr(transformers, str(model_types()[model_type].auto_class(case.task)))
    enlivened(auto.from_config(config)).float().save_pretrained(folder)
    inputs = case.inputs()
    targets = _targets(case, inputs)
    stored = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
    tensors = stored if case.task in EMBEDDINGS else {**stored, "targets": targets}
    safetensors.torch.save_file({key: each.contiguous() for key, each in tensors.items()}, folder / "data.safetensors")
    return {key: value.double() if value.is_floating_point() else value for key, value in stored.items()}, targets


def loaded(folder: Path, task: str) -> tuple[torch.nn.Module, Callable[[], Any]]:
    """Read a folder's model and data as the child of a job does."""
    text = json.dumps({
        "kind": "factors",
        "model": {"source": "directory", "path": str(folder)},
        "data": {"source": "file", "path": str(folder / "data.safetensors")},
        "task": {"type": task},
        "collection": {"fisher": "type2" if task in EMBEDDINGS else "empirical", "dtype": "float64", "batch_size": 4},
    })  # fmt: skip
    document = parse_document(text.encode())
    context = LoaderContext(store=folder / "store")
    model = load_model(document, context)
    return model.model, load_data(document, model, context).batches


def _reference(model_type: str, case: Checkpoint, folder: Path) -> torch.nn.Module:
    auto = getattr(transformers, str(model_types()[model_type].auto_class(case.task)))
    model = auto.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    model.config.use_cache = False
    found: torch.nn.Module = model.double().eval()
    return found


def _targets(case: Checkpoint, inputs: Mapping[str, Tensor]) -> Tensor:
    first = next(iter(inputs.values()))
    if case.task == "causal_lm":
        return first.clone()
    if case.task == "masked_lm":
        return torch.where(torch.rand(first.shape) < 0.5, first, -100)
    shape = first.shape if case.task == "token_classification" else first.shape[:1]
    return torch.randint(0, CLASSES, shape)


def causal(**fields: Any) -> Checkpoint:  # noqa: ANN401 - a configuration's own
    """A decoder that answers for the next token."""
    return Checkpoint(task="causal_lm", fields=fields)


def masked(**fields: Any) -> Checkpoint:  # noqa: ANN401
    """An encoder that answers for some of its tokens."""
    return Checkpoint(task="masked_lm", fields=fields)


def classified(**fields: Any) -> Checkpoint:  # noqa: ANN401
    """A classifier of texts."""
    return Checkpoint(task="sequence_classification", fields={"num_labels": CLASSES, **fields})


def embedded(inputs: Inputs | None = None, **fields: Any) -> Checkpoint:  # noqa: ANN401
    """A tower or encoder of which the mean of the last hidden states is taken."""
    given = {} if inputs is None else {"inputs": inputs}
    return Checkpoint(task="embedding", fields=fields, **given)


def images(size: int = 16, **fields: Any) -> Checkpoint:  # noqa: ANN401
    """A classifier of images."""
    return Checkpoint(task="classification", fields={"num_labels": CLASSES, **fields}, inputs=lambda: pixels(size))


def pixels(size: int) -> dict[str, Tensor]:
    """Return images of random numbers."""
    return {"pixel_values": normal(EXAMPLES, 3, size, size)}


def sounds(name: str = "input_values", shape: tuple[int, ...] = (120,), **fields: Any) -> Checkpoint:  # noqa: ANN401
    """A classifier of sounds."""
    return Checkpoint(
        task="classification", fields={"num_labels": CLASSES, **fields}, inputs=lambda: {name: normal(EXAMPLES, *shape)}
    )


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {"vocab_size": _VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, **_SPECIAL}
_MOE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
_LOCAL = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = GROUPED | {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "moe_intermediate_size": 12,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "head_dim": 4,
}  # fmt: skip
_MAMBA = {"vocab_size": _VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4} | _SPECIAL
_T5 = {"vocab_size": _VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
       "decoder_start_token_id": 0, **_SPECIAL}  # fmt: skip
_VIT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8}  # fmt: skip
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "embed_dim": 8, "embedding_size": 8}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_SOUND = {key: value for key, value in SMALL.items() if key != "max_position_embeddings"} | {
    "conv_dim": [8, 8], "conv_kernel": [5, 3], "conv_stride": [4, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8,
}  # fmt: skip
_WHISPER = {key: value for key, value in SEQUENCE.items() if key != "max_position_embeddings"} | {
    "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16, "classifier_proj_size": 8,
}  # fmt: skip

CASES: dict[str, Checkpoint] = {
    "gpt2": causal(**_GPT),
    "llama": causal(**GROUPED),
    "mistral": causal(**GROUPED),
    "gemma": causal(head_dim=4, **GROUPED),
    "gemma2": causal(head_dim=4, **GROUPED),
    "gemma3_text": causal(head_dim=4, **GROUPED),
    "qwen2": causal(**GROUPED),
    "qwen3": causal(head_dim=4, **GROUPED),
    "qwen2_moe": causal(shared_expert_intermediate_size=12, **_MOE),
    "qwen3_moe": causal(head_dim=4, **_MOE),
    "mixtral": causal(**_LOCAL),
    "jetmoe": causal(kv_channels=4, **_LOCAL),
    "olmoe": causal(num_experts=4, num_experts_per_tok=2, **GROUPED),
    "granite": causal(**GROUPED),
    "granitemoe": causal(**_LOCAL),
    "phimoe": causal(**_LOCAL),
    "gpt_oss": causal(head_dim=4, layer_types=["sliding_attention", "full_attention"], **_LOCAL),
    "llama4_text": causal(head_dim=4, intermediate_size_mlp=24, **{**_LOCAL, "num_experts_per_tok": 1}),
    "deepseek_v2": causal(**_DEEPSEEK),
    "deepseek_v3": causal(**_DEEPSEEK),
    "olmo": causal(**GROUPED),
    "olmo2": causal(**GROUPED),
    "olmo3": causal(**GROUPED),
    "phi": causal(**GROUPED),
    "phi3": causal(**GROUPED),
    "opt": causal(vocab_size=_VOCABULARY, hidden_size=16, word_embed_proj_dim=8, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32, **_SPECIAL),
    "bloom": causal(vocab_size=_VOCABULARY, hidden_size=16, n_layer=2, n_head=4, **_SPECIAL),
    "falcon": causal(alibi=False, new_decoder_architecture=True, num_kv_heads=2, **SMALL),
    "gpt_neox": causal(**SMALL),
    "gptj": causal(rotary_dim=4, **_GPT),
    "gpt_neo": causal(vocab_size=_VOCABULARY, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], max_position_embeddings=32, **_SPECIAL),
    "codegen": causal(rotary_dim=4, **{**_GPT, "n_head": 4}),
    "gpt_bigcode": causal(**_GPT),
    "mamba": causal(**_MAMBA),
    "mamba2": causal(num_heads=4, head_dim=8, n_groups=1, chunk_size=4, **_MAMBA),
    "falcon_mamba": causal(**_MAMBA),
    "jamba": causal(num_experts=2, num_experts_per_tok=1, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, use_mamba_kernels=False, **GROUPED),
    "recurrent_gemma": causal(lru_width=16, attention_window_size=16, **GROUPED),
    "cohere": causal(**GROUPED),
    "cohere2": causal(**GROUPED),
    "stablelm": causal(**GROUPED),
    "starcoder2": causal(**GROUPED),
    "mpt": causal(vocab_size=_VOCABULARY, d_model=16, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=32),
    "persimmon": causal(**SMALL),
    "glm": causal(head_dim=4, **GROUPED),
    "glm4": causal(head_dim=4, **GROUPED),
    "helium": causal(head_dim=4, **GROUPED),
    "smollm3": causal(**GROUPED),
    "arcee": causal(**GROUPED),
    "ernie4_5": causal(head_dim=4, **GROUPED),
    "seed_oss": causal(head_dim=4, **GROUPED),
    "nemotron": causal(head_dim=4, **GROUPED),
    "ministral": causal(head_dim=4, **GROUPED),
    "exaone4": causal(**GROUPED),
    "hunyuan_v1_dense": causal(head_dim=4, **GROUPED),
    "apertus": causal(**GROUPED),
    "lfm2": causal(layer_types=["conv", "full_attention"], **GROUPED),
    "ctrl": causal(vocab_size=_VOCABULARY, n_embd=16, n_layer=2, n_head=2, dff=24, n_positions=32),
    "openai-gpt": causal(**{key: value for key, value in _GPT.items() if "token" not in key}),
    "biogpt": causal(**SMALL),
    "bert": masked(**SMALL),
    "roberta": masked(**SMALL),
    "xlm-roberta": masked(**SMALL),
    "camembert": masked(**SMALL),
    "distilbert": masked(vocab_size=_VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=32, **_SPECIAL),
    "albert": masked(embedding_size=8, **SMALL),
    "electra": masked(embedding_size=8, **SMALL),
    "deberta": masked(relative_attention=True, pos_att_type=["c2p", "p2c"], **SMALL),
    "deberta-v2": masked(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", **SMALL),
    "mobilebert": masked(embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8, num_feedforward_networks=2, **SMALL),
    "modernbert": masked(**SMALL),
    "eurobert": masked(**GROUPED),
    "mpnet": masked(**SMALL),
    "roformer": masked(**SMALL),
    "fnet": masked(**{key: value for key, value in SMALL.items() if key != "num_attention_heads"}),
    "convbert": masked(embedding_size=16, head_ratio=2, conv_kernel_size=3, num_groups=1, **SMALL),
    "big_bird": masked(attention_type="original_full", **SMALL),
    "squeezebert": masked(embedding_size=16, q_groups=1, k_groups=1, v_groups=1, post_attention_groups=1, intermediate_groups=1, output_groups=1, **SMALL),
    "ernie": masked(**SMALL),
    "megatron-bert": masked(**SMALL),
    "rembert": masked(input_embedding_size=8, output_embedding_size=8, **SMALL),
    "esm": masked(**SMALL),
    "xlnet": classified(vocab_size=_VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=24, **_SPECIAL),
    "funnel": classified(vocab_size=_VOCABULARY, block_sizes=[1, 1], num_decoder_layers=1, d_model=16, n_head=2, d_head=8, d_inner=24),
    "t5": embedded(**_T5),
    "mt5": embedded(**_T5),
    "umt5": Checkpoint(task="token_classification", fields={"num_labels": CLASSES, **_T5}),
    "clip_text_model": embedded(projection_dim=8, **SMALL),
    "clip_vision_model": embedded(lambda: pixels(16), projection_dim=8, **_VIT),
    "siglip_vision_model": embedded(lambda: pixels(16), **_VIT),
    "vit": images(**_VIT),
    "dinov2": images(**_VIT),
    "beit": images(use_relative_position_bias=True, **_VIT),
    "vit_msn": images(**_VIT),
    "swin": images(32, **_SWIN),
    "swinv2": images(32, **_SWIN),
    "resnet": images(32, **_STAGES),
    "regnet": images(32, groups_width=4, **_STAGES),
    "convnext": images(32, **_STAGES),
    "convnextv2": images(32, **_STAGES),
    "segformer": images(32, num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2], sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=8),
    "poolformer": images(32, depths=[1, 1], hidden_sizes=[8, 16], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], mlp_ratio=2.0),
    "mobilevit": images(32, image_size=32, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16], num_attention_heads=2),
    "mobilenet_v1": images(32, image_size=32, depth_multiplier=0.25),
    "mobilenet_v2": images(32, image_size=32, depth_multiplier=0.25),
    "wav2vec2": sounds(**_SOUND),
    "hubert": sounds(**_SOUND),
    "wavlm": sounds(**_SOUND),
    "data2vec-audio": sounds(conv_pos_kernel_size=3, **_SOUND),
    "unispeech": sounds(**_SOUND),
    "sew": sounds(squeeze_factor=2, **_SOUND),
    "audio-spectrogram-transformer": sounds("input_values", (32, 16), max_length=32, num_mel_bins=16, frequency_stride=8, time_stride=8, **{key: value for key, value in _VIT.items() if key != "image_size"}),
    "whisper": sounds("input_features", (4, 16), **_WHISPER),
}  # fmt: skip
QUICK = ("qwen3", "modernbert", "t5", "clip_vision_model", "convnext", "wav2vec2")
"""Architectures, of which a landing holds two or more, by its commit."""
