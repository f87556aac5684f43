"""Rules for the fields of a foreign configuration: each with the type that its class declares, and within a bound.

====================  ===========================================================================
an integer            at most 1,024 where its name counts layers, heads or the like; 33,554,432 positions and
                      words; 4,194,304 otherwise; at least 1 where its name is a size's
a number              between -1e12 and 1e12; infinite only as transformers writes it, where the default is so too
a list                at most 1,024 elements of the declared types, by the same rules
a string              one of a list where it chooses a function or a layer (``WORDS``), else the type's own default
an object             refused: nested configurations and rotary parameters have readers of their own
====================  ===========================================================================
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from transformers.activations import ACT2CLS

from worker.execution.refusal import Refusal, names

MAX_DEPTH = 1_024
MAX_LABELS = 100_000
MAX_LIST = 1_024
_MAX_INTEGER, _MAX_POSITIONS = 4_194_304, 33_554_432
_COUNTS = re.compile(
    r"(\w+_)?(layers|depths?|blocks|stages|heads|repeats|groups|streams|codebooks|n_layer|n_head)"
    r"|num_(\w+_)?(layers|blocks|heads|stages)(_\w+)?"
)
_POSITIONS = re.compile(r"\w*(position|length|seq|context|n_ctx|tokens|vocab)\w*")
_DEPTHS = re.compile(r"(\w+_)?(depths|num_blocks|num_layers|block_repeats|block_sizes)")
_SIZES = re.compile(
    r"(\w+_)?(hidden_size|vocab_size|intermediate_size|embedding_size|patch_size|image_size|position_embeddings|"
    r"attention_heads|hidden_layers|num_heads|num_layers|d_model|d_ff|d_kv|ffn_dim|n_embd|n_layers?|n_heads?|"
    r"n_positions|num_channels|dim)"
)
_ACTIVATIONS = frozenset(ACT2CLS)
_ACTIVATION_FIELD = re.compile(r"(\w+_)?(act|activation|afn)(_fn|_func|_function)?|\w+_glu_type|hidden_mamba_act")
LAYER_TYPES = frozenset({
    "full_attention", "sliding_attention", "chunked_attention", "window_attention", "indexed_attention", "conv", "moe",
    "hybrid", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse", "hybrid_sliding",
    "linear_attention", "sparse", "dense", "mamba", "mamba2", "attention", "recurrent", "deepseek_sparse_attention",
    "qwen_sparse_attention", "mlp", "full", "shared",
})  # fmt: skip
WORDS: Mapping[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "attention_types": "global local",
        "attention_type": "original_full block_sparse relative_shift factorized prob full divided_space_time "
        "space_only joint_space_time",
        "attn_layers": "local lsh",
        "attn_type": "bi uni vanilla",
        "classifier_pooling": "cls mean late bos",
        "cross_attention_shape_for_attention": "kv q",
        "encoder_attention_type": "local transient-global",
        "feat_extract_norm": "group layer",
        "feed_forward_proj": " ".join(f"{gate}{each}" for each in sorted(_ACTIVATIONS) for gate in ("", "gated-")),
        "global_padding": "same valid",
        "layer_type": "basic bottleneck preactivation x y",
        "mamba_d_head": "auto",
        "mamba_dt_rank": "auto",
        "norm_rel_ebd": "none layer_norm",
        "norm_type": "weight_norm time_group_norm layer_norm rms_norm low_precision_layernorm batchnorm layernorm",
        "normalization_type": "no_norm layer_norm",
        "pos_att_type": "c2p p2c p2p c2p|p2c p2c|c2p",
        "position_embedding_type": "absolute rotary sine learned sincos rope relative_key nope",
        "position_embeddings_type": "rotary relative relative_key",
        "problem_type": "regression single_label_classification multi_label_classification",
        "qkv_projection_method": "dw_bn avg lin",
        "scoring_func": "softmax sigmoid sqrtsoftplus",
        "summary_type": "last first mean cls_index",
        "time_step_rank": "auto",
        "topk_method": "greedy group_limited_greedy noaux_tc",
    }.items()
}
"""Words that a field may hold besides its type's default."""
_NAMED = re.compile(r"[A-Za-z]{2,3}([_-][A-Za-z]{2,8})*", re.ASCII)
_FREE = frozenset({"languages", "default_language", "langs"})
"""Fields whose strings name parameters, and nothing that is looked for elsewhere."""


_INFINITE = ({"__float__": "Infinity"},)
"""How transformers writes an infinite number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a configuration as its class declares it."""

    name: str
    kinds: frozenset[type]
    """Of int, float, bool, str, list, dict and NoneType."""
    elements: frozenset[type]
    """The types within a list, at any depth."""
    words: frozenset[str]
    """The strings that the declaration itself names."""
    default: Any


@functools.cache
def declared_fields(kind: type) -> Mapping[str, Field]:
    """Return the fields that a configuration's class has of its own, by name."""
    return {each.name: _field(each) for each in dataclasses.fields(kind)}


def _field(each: "dataclasses.Field[Any]") -> Field:
    default = None if each.default is dataclasses.MISSING else each.default
    if each.default_factory is not dataclasses.MISSING:
        default = each.default_factory()
    kinds, elements, words = _kinds(each.type)
    default = _listed(default)
    if isinstance(default, list):
        kinds, elements = kinds.union({list}), elements | _leaves(default)
    elif isinstance(default, (bool, int, float, str)) or default is None:
        kinds = kinds.union({type(default)})
    return Field(
        name=each.name, kinds=frozenset[Any](kinds), elements=frozenset[Any](elements), words=words, default=default
    )


def _listed(value: Any) -> Any:  # noqa: ANN401 - a default of any type
    return [_listed(each) for each in value] if isinstance(value, (list, tuple)) else value


def _leaves(values: Sequence[Any]) -> frozenset[Any]:
    nested = [_leaves(each) if isinstance(each, list) else frozenset({type(each)}) for each in values]
    return frozenset().union(*nested)


def _kinds(annotation: Any) -> tuple[frozenset[Any], frozenset[Any], frozenset[str]]:  # noqa: ANN401
    """Return the types of an annotation, those within its lists, and the strings of its literals."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [_kinds(each) for each in arguments]
        return tuple(frozenset().union(*column) for column in zip(*parts, strict=True))  # type: ignore[return-value]
    if origin is typing.Literal:
        return frozenset(map(type, arguments)), frozenset(), frozenset(e for e in arguments if isinstance(e, str))
    if annotation in (list, tuple) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        inner = [_kinds(each) for each in arguments if each is not ...]
        within = frozenset().union(*(kinds | elements for kinds, elements, _ in inner)) - {list}
        return frozenset({list}), within, frozenset().union(*(words for _, _, words in inner))
    if annotation in (int, float, bool, str, type(None)):
        return frozenset({annotation}), frozenset(), frozenset()
    return frozenset({dict}), frozenset(), frozenset()


def read_value(field: Field, value: Any, pointer: str) -> Any:  # noqa: ANN401 - decoded from JSON
    """Return a field's value; ``Refusal`` if it has another type than its class declares, or lies beyond its bound."""
    if isinstance(value, dict):
        refuse(f"`{field.name}` is an object, which is not read", pointer)
    if value is None:
        if type(None) not in field.kinds:
            refuse(f"`{field.name}` must be {_expected(field.kinds)} (got null)", pointer)
        return None
    if isinstance(value, list):
        if list not in field.kinds:
            refuse(_unfit(field, field.kinds), pointer)
        return read_list(field, value, pointer)
    return _read_plain(field, field.kinds, value, pointer)


def read_list(field: Field, values: list[Any], pointer: str) -> list[Any]:
    """Return a list of which every element, at any depth, keeps the rules."""
    _require_short(field.name, values, pointer)
    if _DEPTHS.fullmatch(field.name):
        total = sum(each for each in values if type(each) is int)
        if total > MAX_DEPTH:
            refuse(f"`{field.name}` are {total:,} layers together; at most {MAX_DEPTH:,} are read", pointer)
    kinds = field.elements or frozenset({int, float, bool, str, type(None)})
    return [
        read_list(field, each, pointer) if isinstance(each, list)
        else None if each is None and (type(None) in kinds or not field.elements)
        else _read_plain(field, kinds, each, pointer)
        for each in values
    ]  # fmt: skip


def read_undeclared(name: str, value: Any, pointer: str) -> Any:  # noqa: ANN401 - decoded from JSON
    """Return the value of a field that a class reads and does not declare: a number, a flag, a word or a list."""
    kinds: frozenset[Any] = frozenset({int, float, bool, list, type(None)})
    if name in WORDS or _ACTIVATION_FIELD.fullmatch(name):
        kinds |= {str}
    field = Field(name=name, kinds=kinds, elements=kinds - {list}, words=frozenset(), default=None)
    return read_value(field, value, pointer)


def read_integer(name: str, value: Any, least: int, most: int, pointer: str) -> int:  # noqa: ANN401
    """Return a whole number between two bounds."""
    if type(value) is not int:
        refuse(f"`{name}` must be an integer", pointer)
    if not least <= value <= most:
        shown = f"{value:,}" if abs(value) < 10**18 else "too large"
        refuse(f"`{name}` is {shown}; accepted are {least:,} to {most:,}", pointer)
    return value


def read_number(name: str, value: Any, pointer: str) -> float:  # noqa: ANN401
    """Return a number as a float."""
    # NaN lies between no two numbers, and a whole number of 400 digits has no float
    if type(value) not in (int, float) or not -1e12 <= value <= 1e12:
        refuse(f"`{name}` must be a number between -1e12 and 1e12", pointer)
    return float(value)


def _read_plain(field: Field, kinds: frozenset[type], value: Any, pointer: str) -> Any:  # noqa: ANN401
    name = field.name
    if value in _INFINITE and float("inf") in _flat(field.default):
        return float("inf")
    if isinstance(value, str):
        return _read_word(field, kinds, value, pointer)
    if isinstance(value, (list, dict)) or (isinstance(value, bool) and bool not in kinds):
        refuse(_unfit(field, kinds), pointer)
    if isinstance(value, bool):
        return value
    if type(value) is int and int in kinds:
        least, most = integer_bounds(field)
        return read_integer(name, value, least, most, pointer)
    if float not in kinds:
        refuse(_unfit(field, kinds), pointer)
    return read_number(name, value, pointer)


def _flat(values: Any) -> list[Any]:  # noqa: ANN401 - a default of any type
    return [leaf for each in values for leaf in _flat(each)] if isinstance(values, list) else [values]


def integer_bounds(field: Field) -> tuple[int, int]:
    """Return the least and the largest value of a field that holds integers."""
    counts = _COUNTS.fullmatch(field.name) is not None
    most = MAX_DEPTH if counts else _MAX_POSITIONS if _POSITIONS.fullmatch(field.name) else _MAX_INTEGER
    size = _SIZES.fullmatch(field.name) and field.default is not None and field.default != 0
    return (1 if size else 0 if counts else -_MAX_INTEGER), most


def _read_word(field: Field, kinds: frozenset[type], value: str, pointer: str) -> str:
    known = words_of(field)
    if str not in kinds or not (known or field.name in _FREE):
        refuse(_unfit(field, kinds), pointer)
    if value not in known and not (field.name in _FREE and _NAMED.fullmatch(value)):
        refuse(f"`{field.name}` is not one of {', '.join(sorted(known))} (got {names([value])})", pointer)
    return value


def words_of(field: Field) -> frozenset[str]:
    """Return the strings that a field may hold: those of its declaration, of the lists here, and its default's."""
    own = frozenset(each for each in _flat(field.default) if isinstance(each, str))
    if field.words:
        return field.words | own
    if _ACTIVATION_FIELD.fullmatch(field.name):
        return _ACTIVATIONS | own
    if field.name.endswith(("layer_types", "layers_block_type", "block_types", "indexer_types")):
        return LAYER_TYPES | own
    return WORDS.get(field.name, frozenset()) | own


def _require_short(name: str, values: list[Any], pointer: str) -> None:
    if len(values) > MAX_LIST:
        refuse(f"`{name}` has {len(values):,} elements; at most {MAX_LIST:,} are read", pointer)


def _unfit(field: Field, kinds: frozenset[type]) -> str:
    if _ACTIVATION_FIELD.fullmatch(field.name) and str in kinds:
        return f"`{field.name}` is not one of {', '.join(sorted(_ACTIVATIONS))}"
    if float in kinds:
        return f"`{field.name}` must be a number between -1e12 and 1e12"
    return f"`{field.name}` must be {_expected(kinds)}"


def _expected(kinds: frozenset[type]) -> str:
    said = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list"}
    return " or ".join(text for kind, text in said.items() if kind in kinds) or "left out"


def refuse(message: str, pointer: str, code: str = "invalid_config") -> NoReturn:
    """Refuse a configuration."""
    raise Refusal(f"config.json: {message}", pointer=pointer, code=code)


_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "axial")
_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
                 "attention_factor", "beta_fast", "beta_slow", "partial_rotary_factor",
                 "llama_4_scaling_beta", "max_position_embeddings")  # fmt: skip
_ROPE_SCALES = ("mscale", "mscale_all_dim")
_ROPE_LISTS = ("short_factor", "long_factor", "mrope_section")
_ROPE_FLAGS = ("truncate", "mrope_interleaved")
_ROPE_FIELDS = (*_ROPE_NUMBERS, *_ROPE_SCALES, *_ROPE_LISTS, *_ROPE_FLAGS, "rope_type", "type", "rope_theta",
                "finetuned")  # fmt: skip
ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def read_rotary(config: dict[str, Any], kind: Any, pointer: str, *, partial: bool) -> dict[str, Any]:  # noqa: ANN401 - a class of transformers
    """Return rotary parameters, from either spelling, with known kinds and plain numbers only.

    ``kind`` is the configuration's class; with ``partial`` the model reads a share of each head's width that is
    rotated.
    """
    found: dict[str, Any] = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if config.get(name) is not None:
            found[name] = read_number(name, config[name], pointer)
    _require_partial(found, kind, pointer, partial=partial)
    # each under its own name: some classes take the older one for one type of layers alone
    for name in ("rope_parameters", "rope_scaling"):
        if config.get(name):
            found[name] = _either(config[name], kind, pointer, partial=partial)
    return found


def _either(given: Any, kind: Any, pointer: str, *, partial: bool) -> dict[str, Any]:  # noqa: ANN401 - of JSON, and of transformers
    """Return one set of parameters, or one for each type of layers."""
    if not isinstance(given, dict):
        refuse("`rope_scaling` must be an object", pointer)
    if given and all(isinstance(each, (dict, type(None))) for each in given.values()):
        other = next((name for name in given if name not in LAYER_TYPES and name not in ("main", "compress")), None)
        if other is not None:
            refuse(f"`rope_parameters` has {names([other])}, which is not a type of layers", pointer)
        return {key: each and _parameters(each, kind, pointer, partial=partial) for key, each in given.items()}
    return _parameters(given, kind, pointer, partial=partial)


def _parameters(given: dict[str, Any], kind: Any, pointer: str, *, partial: bool) -> dict[str, Any]:  # noqa: ANN401 - as above
    other = next((name for name in given if name not in _ROPE_FIELDS and given[name] is not None), None)
    alone = next((name for name in _ROPE_SCALES if given.get(name) is not None), None)
    if alone is not None and any(given.get(name) is None for name in _ROPE_SCALES):
        other = alone
    if other is not None:
        refuse(f"`rope_scaling` has {names([other])}, which is not read and would change the model", pointer)
    rope_type = given.get("rope_type", given.get("type", "default"))
    # what the first models for text and images called so is the default with `mrope_section`
    rope_type = "default" if rope_type == "mrope" else rope_type
    if rope_type not in _ROPE_TYPES:
        refuse(f"`rope_scaling` has an unknown type; known are {', '.join(_ROPE_TYPES)}", pointer)
    found: dict[str, Any] = {"rope_type": rope_type}
    for name in ("rope_theta", *_ROPE_NUMBERS, *_ROPE_SCALES):
        if given.get(name) is not None:
            number = read_number(name, given[name], pointer)
            found[name] = given[name] if type(given[name]) is int and name != "rope_theta" else number
    for name in (*_ROPE_LISTS, *_ROPE_FLAGS):
        if given.get(name) is not None:
            found[name] = read_undeclared(name, given[name], pointer)
    # every other kind reads the share, whatever the model
    _require_partial(found, kind, pointer, partial=partial or rope_type != "default")
    return found


def _require_partial(found: dict[str, Any], kind: Any, pointer: str, *, partial: bool) -> None:  # noqa: ANN401 - as above
    share = found.get("partial_rotary_factor")
    if share is not None and share != 1 and not partial:
        refuse(f"`partial_rotary_factor` is {str(share)[:40]}, which a `{kind.model_type}` does not read", pointer)
