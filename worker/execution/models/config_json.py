"""Read a foreign ``config.json``: bounded, strictly typed, known fields only.

transformers would follow ``auto_map``, fetch an attention kernel and open a name or path; here
nothing but the fields of ``families`` goes on, each with its type and its bound.

===========================================  ==========================================================
a field that is not read                     what becomes of it
===========================================  ==========================================================
has the value that the built model has       nothing is lost
acts in training, generation or loading      listed
``transformers`` does not know               listed
any other                                    refused: the model would be another
===========================================  ==========================================================
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import transformers

from worker.execution.files.open_files import OpenFile
from worker.execution.loader_context import LoaderContext
from worker.execution.models.families import FAMILIES, MAX_DEPTH, MAX_LABELS, Family, Fields
from worker.execution.refusal import Refusal, names, unique_keys

_HARMLESS = re.compile(
    r"""(_name_or_path|name_or_path|architectures|auto_map|transformers_version|torch_dtype|dtype|use_cache|torchscript
    |initializer_\w+|init_\w+|\w*dropout\w*|\w*_drop|layerdrop|\w*_pdrop|resid_pdrop|gradient_checkpointing
    |output_(attentions|hidden_states)|return_dict|task_specific_params|finetuning_task|\w+_token_id|\w+_token
    |id2label|label2id|num_labels|_num_labels|tokenizer_class|attn_implementation|_attn_implementation\w*
    |summary_\w+|prefix|problem_type|classifier_\w+|tie_weights_|pretraining_tp|use_bfloat16|directionality|pooler_\w+
    |max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_k|top_p
    |typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids
    |num_return_sequences|remove_invalid_values|exponential_decay_length_penalty|suppress_tokens
    |begin_suppress_tokens|forced_\w+|decoder_start_token_id|reorder_and_upcast_attn|chunk_size_feed_forward
    |vocab_size|language|gradient_\w+|dataset\w*|metadata\w*|model_type|is_composition|out_(features|indices)|stage_names
    |unsloth_\w+|special_tokens_map\w*|mask_\w+|encoder_stride|cross_attention_hidden_size)""",
    re.VERBOSE,
)
"""Fields that change nothing of a forward pass in evaluation mode."""
_MISSING = object()


def account_for_fields(
    config: Mapping[str, Any],
    read: frozenset[str],
    built: Any,  # noqa: ANN401 - a configuration of transformers
    context: LoaderContext,
    pointer: str,
) -> None:
    """List the fields that are not read, and refuse those by which the model would be another."""
    changing = []
    for name in sorted(set(config) - read):
        value, own = config[name], getattr(built, name, _MISSING)
        if _is_same(value, own):
            continue
        if own is _MISSING or _HARMLESS.fullmatch(name) or value in (None, [], {}):
            context.unused(f"config.json: {names([name])}")
        else:
            changing.append(name)
    if changing:
        few = [(name, _shown(config[name]), _shown(getattr(built, name))) for name in changing[:3]]
        shown = ", ".join(f"{names([name])} ({value}, and {own} here)" for name, value, own in few)
        raise Refusal(
            f"config.json: {shown} would make it another model, and is not read; load the model yourself, and give it "
            "by `source: factory` or to `kronoscope.local.measure`",
            pointer=pointer,
            code="unread_field",
        )


def _shown(value: object) -> str:
    return repr(value)[:60]


def _is_same(value: Any, own: Any) -> bool:  # noqa: ANN401 - decoded from JSON, and an attribute of transformers
    if isinstance(own, tuple):
        own = list(own)
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (value, own))
    return (numbers or type(value) is type(own)) and bool(value == own)


_MAX_CONFIG_BYTES = 2**20
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
                 "attention_factor", "beta_fast", "beta_slow")  # fmt: skip
_NO_JSON = "is not valid JSON (NaN and Infinity are not)"
_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct")
_ROPE_FIELDS = (*_ROPE_NUMBERS, "rope_type", "type", "rope_theta", "finetuned", "partial_rotary_factor")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The architecture that a config describes, as far as it is trusted."""

    model_type: str
    family: Family
    fields: Fields
    labels: int | None
    end_id: int | None
    """The token that ends a text, where the config names one."""
    configuration: Any
    """transformers' configuration object, built from ``fields`` alone."""


def read_architecture(file: OpenFile | None, context: LoaderContext, pointer: str) -> Architecture:
    """Read the architecture in a ``config.json``."""
    config = _read_json(file, pointer)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        shown = repr(model_type[:60]) if isinstance(model_type, str) else "missing"
        _refuse(f"`model_type` is {shown}; known are {', '.join(FAMILIES)}", pointer)
    if config.get("quantization_config") is not None:
        _refuse("`quantization_config` is set; curvature needs full weights: take the unquantised model", pointer)
    family = FAMILIES[model_type]
    defaults = getattr(transformers, family.config)()
    fields = _fields(config, family, defaults, pointer)
    if family.divides is not None:
        width, heads = (fields[name] for name in family.divides)
        if width % heads:
            _refuse(f"`{family.divides[1]}` is {heads}, which does not divide `{family.divides[0]}` {width}", pointer)
    depth = sum(fields.get("depths", ()))
    if depth > MAX_DEPTH:
        _refuse(f"`depths` are {depth:,} layers together; at most {MAX_DEPTH:,} are read", pointer)
    extra: dict[str, Any] = dict(family.fixed)
    if family.rotary:
        extra["rope_parameters"] = _rope(config, model_type, pointer)
    labels = _labels(config, pointer)
    if labels is not None:
        extra["num_labels"] = labels
    configuration = getattr(transformers, family.config)(**fields, **extra)
    account_for_fields(config, _fields_read(family), configuration, context, pointer)
    return Architecture(
        model_type=model_type,
        family=family,
        fields=fields,
        labels=labels,
        end_id=_end_id(config, fields("vocab_size")),
        configuration=configuration,
    )


def _fields_read(family: Family) -> frozenset[str]:
    """Names of all fields that are read of a family's configuration."""
    rotary = _ROTARY if family.rotary else ()
    own = (*family.sizes, *family.optional, *family.numbers, *family.flags, *family.words, *(family.lists or {}))
    return frozenset((*own, *rotary, "model_type", "id2label", "num_labels", "eos_token_id", "quantization_config"))


def _read_json(file: OpenFile | None, pointer: str) -> dict[str, Any]:
    if file is None:
        _refuse("is missing; a checkpoint folder holds config.json and *.safetensors", pointer, code="not_found")
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        _refuse(f"has {file.stat().st_size:,} bytes; at most {_MAX_CONFIG_BYTES:,} are read", pointer)
    try:
        value = json.loads(file.read_bytes(), parse_constant=_no_constant, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        _refuse(str(error) if str(error).startswith("two fields") else _NO_JSON, pointer)
    if not isinstance(value, dict):
        _refuse("is not a JSON object", pointer)
    return value


def _fields(config: dict[str, Any], family: Family, defaults: Any, pointer: str) -> Fields:  # noqa: ANN401 - a config class of transformers
    """The family's own fields; what a config leaves out has transformers' default."""
    found = Fields()
    for name, most in family.sizes.items():
        found[name] = _integer(name, config.get(name, getattr(defaults, name)), 1, most, pointer)
    for name, most in family.optional.items():
        value = config.get(name, getattr(defaults, name, None))
        # -1 is a common spelling of "none"
        found[name] = None if value in (None, -1) else _integer(name, value, 0, most, pointer)
    for name in family.numbers:
        if name in config:
            found[name] = _number(name, config[name], pointer)
    for name in family.flags:
        if name in config:
            found[name] = _flag(name, config[name], pointer)
    for name, choices in family.words.items():
        value = config.get(name, getattr(defaults, name, None))
        if value is not None:
            found[name] = _word(name, value, choices, pointer)
    for name, most in (family.lists or {}).items():
        found[name] = _integers(name, config.get(name, getattr(defaults, name)), most, pointer)
    # the only value accepted is the only one there is
    found.pop("position_embedding_type", None)
    return found


def _flag(name: str, value: Any, pointer: str) -> bool:  # noqa: ANN401
    if not isinstance(value, bool):
        _refuse(f"`{name}` must be true or false", pointer)
    return value


def _word(name: str, value: Any, choices: frozenset[str], pointer: str) -> str:  # noqa: ANN401
    if not isinstance(value, str) or value not in choices:
        _refuse(f"`{name}` is not one of {', '.join(sorted(choices))}", pointer)
    return value


def _integers(name: str, value: Any, most: int, pointer: str) -> list[int]:  # noqa: ANN401
    if not isinstance(value, list) or not 1 <= len(value) <= 64:
        _refuse(f"`{name}` must be a list of 1 to 64 integers", pointer)
    return [_integer(name, item, 1, most, pointer) for item in value]


def _integer(name: str, value: Any, least: int, most: int, pointer: str) -> int:  # noqa: ANN401
    if type(value) is not int:
        _refuse(f"`{name}` must be an integer", pointer)
    if not least <= value <= most:
        shown = f"{value:,}" if abs(value) < 10**18 else "too large"
        _refuse(f"`{name}` is {shown}; accepted are {least:,} to {most:,}", pointer)
    return value


def _number(name: str, value: Any, pointer: str) -> float:  # noqa: ANN401
    # NaN lies between no two numbers, and a whole number of 400 digits has no float
    if type(value) not in (int, float) or not 0 <= value <= 1e12:
        _refuse(f"`{name}` must be a number between 0 and 1e12", pointer)
    return float(value)


def _rope(config: dict[str, Any], model_type: str, pointer: str) -> dict[str, Any]:
    """Rotary parameters, from either spelling, with known kinds and plain numbers only."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        _refuse("`rope_scaling` must be an object", pointer)
    other = next((name for name in given if name not in _ROPE_FIELDS and given[name] is not None), None)
    if other is not None:
        _refuse(f"`rope_scaling` has {names([other])}, which is not read and would change the model", pointer)
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if model_type != "gpt_neox" and partial not in (None, 1, 1.0):
        _refuse(f"`partial_rotary_factor` is {str(partial)[:40]}, which a `{model_type}` does not read here", pointer)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPE_TYPES:
        _refuse(f"`rope_scaling` has an unknown type; known are {', '.join(_ROPE_TYPES)}", pointer)
    theta = given.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10_000.0)))
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": _number("rope_theta", theta, pointer)}
    for name in _ROPE_NUMBERS:
        if name in given:
            number = _number(name, given[name], pointer)
            found[name] = given[name] if type(given[name]) is int else number
    if model_type == "gpt_neox":
        share = given.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
        found["partial_rotary_factor"] = _number("rotary_pct", share, pointer)
    return found


def _labels(config: dict[str, Any], pointer: str) -> int | None:
    names = config.get("id2label")
    if isinstance(names, dict):
        count = len(names)
    elif "num_labels" in config:
        count = _integer("num_labels", config["num_labels"], 1, MAX_LABELS, pointer)
    else:
        return None
    return _integer("id2label", count, 1, MAX_LABELS, pointer)


def _end_id(config: dict[str, Any], vocabulary: int) -> int | None:
    given = config.get("eos_token_id")
    first = given[0] if isinstance(given, list) and given else given
    return first if type(first) is int and 0 <= first < vocabulary else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _refuse(message: str, pointer: str, code: str = "invalid_config") -> NoReturn:
    raise Refusal(f"config.json: {message}", pointer=pointer, code=code)
