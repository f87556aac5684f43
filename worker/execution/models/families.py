"""Families of architectures that a checkpoint may have: the config fields of each, their bounds, its size.

A family is looked up by ``model_type``. Only the fields named here reach transformers; whatever
else a ``config.json`` holds (``auto_map``, an attention implementation, a name or path) is
dropped. Sizes are bounded and the number of weights is known in closed form, so that an absurd
config costs nothing: a million labels take transformers 6 s, a million layers an hour.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_LABELS = 100_000
MAX_DEPTH = 1_024
_WIDTH, _DEPTH, _VOCABULARY, _LENGTH = 65_536, MAX_DEPTH, 4_194_304, 4_194_304


class Fields(dict[str, Any]):
    """A config's fields, of which the formulas below read whole numbers."""

    def __call__(self, name: str) -> int:
        """The whole number of that name; 0 where it may be left out and is."""
        return int(self.get(name) or 0)


_TEXT_TASKS = frozenset({"sequence_classification", "classification", "regression", "sentence_embedding"})
_TOKEN_TASKS = _TEXT_TASKS | {"token_classification"}
_IMAGE_TASKS = frozenset({"classification", "regression"})


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``."""

    config: str
    """Name of transformers' configuration class."""
    sizes: Mapping[str, int]
    """Positive integers, each with its largest accepted value; all have a default there."""
    optional: Mapping[str, int]
    """Integers that may be null or 0."""
    numbers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    words: Mapping[str, frozenset[str]]
    weights: Callable[[Fields], int]
    """Entries of the weight matrices of the bare model, from its sizes."""
    tasks: frozenset[str]
    divides: tuple[str, str] | None = None
    """Width and heads, where the second must divide the first."""
    vocabulary: bool = True
    length: str | None = None
    """The field that says how many positions there are."""
    reserved_positions: int = 0
    """Positions among these that no token can take."""
    explicit_positions: bool = False
    rotary: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()
    lists: Mapping[str, int] | None = None
    """Lists of positive integers and the largest value in each."""


_ACTIVATIONS = frozenset({"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish",
                          "tanh", "mish"})  # fmt: skip


def _bert_weights(f: Fields) -> int:
    d, wide = f("hidden_size"), f("intermediate_size")
    tables = f("vocab_size") + f("max_position_embeddings") + f("type_vocab_size")
    return tables * d + f("num_hidden_layers") * (4 * d * d + 2 * d * wide)


def _distilbert_weights(f: Fields) -> int:
    d = f("dim")
    return (f("vocab_size") + f("max_position_embeddings")) * d + f("n_layers") * (4 * d * d + 2 * d * f("hidden_dim"))


def _gpt2_weights(f: Fields) -> int:
    d = f("n_embd")
    wide = f("n_inner") or 4 * d
    return (f("vocab_size") + f("n_positions")) * d + f("n_layer") * (4 * d * d + 2 * d * wide)


def _gpt_neox_weights(f: Fields) -> int:
    d = f("hidden_size")
    return f("vocab_size") * d + f("num_hidden_layers") * (4 * d * d + 2 * d * f("intermediate_size"))


def _opt_weights(f: Fields) -> int:
    d = f("hidden_size")
    tables = f("vocab_size") * f("word_embed_proj_dim") + f("max_position_embeddings") * d
    return tables + f("num_hidden_layers") * (4 * d * d + 2 * d * f("ffn_dim"))


def _llama_weights(f: Fields) -> int:
    d, heads = f("hidden_size"), f("num_attention_heads")
    head = f("head_dim") or d // heads
    attention = 2 * d * heads * head + 2 * d * (f("num_key_value_heads") or heads) * head
    return f("vocab_size") * d + f("num_hidden_layers") * (attention + 3 * d * f("intermediate_size"))


def _vit_weights(f: Fields) -> int:
    d = f("hidden_size")
    patches = (f("image_size") // f("patch_size")) ** 2
    stem = f("num_channels") * f("patch_size") ** 2 * d + patches * d
    return stem + f("num_hidden_layers") * (4 * d * d + 2 * d * f("intermediate_size"))


def _resnet_weights(f: Fields) -> int:
    total = 49 * f("num_channels") * f("embedding_size")
    for width, depth in zip(f["hidden_sizes"], f["depths"], strict=False):
        inner = int(width) // 4 if f["layer_type"] == "bottleneck" else int(width)
        total += int(depth) * 9 * inner * inner
    return total


def _bert(config: str, *, reserved: int, explicit: bool) -> Family:
    return Family(
        config=config,
        sizes={"vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "num_hidden_layers": _DEPTH,
               "num_attention_heads": _DEPTH, "intermediate_size": 4 * _WIDTH, "max_position_embeddings": _LENGTH,
               "type_vocab_size": _WIDTH},
        optional={"pad_token_id": _VOCABULARY},
        numbers=("layer_norm_eps",),
        flags=("tie_word_embeddings",),
        words={"hidden_act": _ACTIVATIONS, "position_embedding_type": frozenset({"absolute"})},
        weights=_bert_weights,
        tasks=_TOKEN_TASKS | {"masked_lm"},
        divides=("hidden_size", "num_attention_heads"),
        length="max_position_embeddings",
        reserved_positions=reserved,
        explicit_positions=explicit,
    )  # fmt: skip


def _llama(config: str, *optional: str) -> Family:
    return Family(
        config=config,
        sizes={"vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "num_hidden_layers": _DEPTH,
               "num_attention_heads": _DEPTH, "intermediate_size": 4 * _WIDTH, "max_position_embeddings": _LENGTH},
        optional={"pad_token_id": _VOCABULARY, "num_key_value_heads": _DEPTH} | dict.fromkeys(optional, _LENGTH),
        numbers=("rms_norm_eps",),
        flags=("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"),
        words={"hidden_act": _ACTIVATIONS},
        weights=_llama_weights,
        tasks=_TOKEN_TASKS | {"causal_lm"},
        length="max_position_embeddings",
        rotary=True,
        fixed=(("bos_token_id", None), ("eos_token_id", None)),
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    "bert": _bert("BertConfig", reserved=0, explicit=True),
    # positions start after the padding index there, one row per example already
    "roberta": _bert("RobertaConfig", reserved=2, explicit=False),
    "xlm-roberta": _bert("XLMRobertaConfig", reserved=2, explicit=False),
    "distilbert": Family(
        config="DistilBertConfig",
        sizes={"vocab_size": _VOCABULARY, "dim": _WIDTH, "n_layers": _DEPTH, "n_heads": _DEPTH,
               "hidden_dim": 4 * _WIDTH, "max_position_embeddings": _LENGTH},
        optional={"pad_token_id": _VOCABULARY},
        flags=("sinusoidal_pos_embds", "tie_word_embeddings"),
        words={"activation": _ACTIVATIONS},
        weights=_distilbert_weights,
        tasks=_TOKEN_TASKS | {"masked_lm"},
        divides=("dim", "n_heads"),
        length="max_position_embeddings",
        explicit_positions=True,
    ),
    "gpt2": Family(
        config="GPT2Config",
        sizes={"vocab_size": _VOCABULARY, "n_embd": _WIDTH, "n_layer": _DEPTH, "n_head": _DEPTH,
               "n_positions": _LENGTH},
        optional={"n_inner": 4 * _WIDTH, "pad_token_id": _VOCABULARY},
        numbers=("layer_norm_epsilon",),
        flags=("tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
        words={"activation_function": _ACTIVATIONS},
        weights=_gpt2_weights,
        tasks=_TOKEN_TASKS | {"causal_lm"},
        divides=("n_embd", "n_head"),
        length="n_positions",
        explicit_positions=True,
        fixed=(("bos_token_id", None), ("eos_token_id", None)),
    ),
    "gpt_neox": Family(
        config="GPTNeoXConfig",
        sizes={"vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "num_hidden_layers": _DEPTH,
               "num_attention_heads": _DEPTH, "intermediate_size": 4 * _WIDTH, "max_position_embeddings": _LENGTH},
        optional={"pad_token_id": _VOCABULARY},
        numbers=("layer_norm_eps",),
        flags=("tie_word_embeddings", "attention_bias", "use_parallel_residual"),
        words={"hidden_act": _ACTIVATIONS},
        weights=_gpt_neox_weights,
        tasks=_TOKEN_TASKS | {"causal_lm"},
        divides=("hidden_size", "num_attention_heads"),
        length="max_position_embeddings",
        rotary=True,
        fixed=(("bos_token_id", None), ("eos_token_id", None)),
    ),
    "opt": Family(
        config="OPTConfig",
        sizes={"vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "num_hidden_layers": _DEPTH,
               "num_attention_heads": _DEPTH, "ffn_dim": 4 * _WIDTH, "max_position_embeddings": _LENGTH,
               "word_embed_proj_dim": _WIDTH},
        optional={"pad_token_id": _VOCABULARY},
        flags=("tie_word_embeddings", "do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"),
        words={"activation_function": _ACTIVATIONS},
        weights=_opt_weights,
        tasks=_TEXT_TASKS | {"causal_lm"},
        divides=("hidden_size", "num_attention_heads"),
        length="max_position_embeddings",
        fixed=(("bos_token_id", None), ("eos_token_id", None)),
    ),
    "llama": _llama("LlamaConfig", "head_dim"),
    "mistral": _llama("MistralConfig", "head_dim", "sliding_window"),
    "qwen2": _llama("Qwen2Config", "sliding_window", "max_window_layers"),
    "vit": Family(
        config="ViTConfig",
        sizes={"hidden_size": _WIDTH, "num_hidden_layers": _DEPTH, "num_attention_heads": _DEPTH,
               "intermediate_size": 4 * _WIDTH, "image_size": 8_192, "patch_size": 1_024, "num_channels": 256},
        optional={},
        numbers=("layer_norm_eps",),
        flags=("qkv_bias",),
        words={"hidden_act": _ACTIVATIONS},
        weights=_vit_weights,
        tasks=_IMAGE_TASKS,
        divides=("hidden_size", "num_attention_heads"),
        vocabulary=False,
    ),
    "resnet": Family(
        config="ResNetConfig",
        sizes={"embedding_size": _WIDTH, "num_channels": 256},
        optional={},
        flags=("downsample_in_first_stage", "downsample_in_bottleneck"),
        words={"hidden_act": _ACTIVATIONS, "layer_type": frozenset({"basic", "bottleneck"})},
        weights=_resnet_weights,
        tasks=_IMAGE_TASKS,
        vocabulary=False,
        lists={"hidden_sizes": _WIDTH, "depths": _DEPTH},
    ),
}  # fmt: skip
