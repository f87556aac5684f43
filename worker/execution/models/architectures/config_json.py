"""Configuration of a checkpoint, read from a stranger's ``config.json``: bounded, strictly typed, known fields only.

transformers would follow ``auto_map``, fetch an attention kernel and open a name or path; here
nothing but the fields that the type's own class declares goes on, each by the rules of ``config_fields``.

===========================================  ==========================================================
a field that is not read                     what becomes of it
===========================================  ==========================================================
has the value that the built model has       nothing is lost
acts in training, generation or loading      listed
``transformers`` does not know               listed
any other                                    refused: the model would be another
===========================================  ==========================================================
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from worker.execution.data.labels import class_names
from worker.execution.files.open_files import OpenFile
from worker.execution.loader_context import LoaderContext
from worker.execution.models.architectures.bounded_build import bounded
from worker.execution.models.architectures.config_fields import (
    MAX_DEPTH,
    ROTARY,
    Field,
    declared_fields,
    read_integer,
    read_rotary,
    read_undeclared,
    read_value,
    refuse,
)
from worker.execution.models.architectures.head_fields import read_labels
from worker.execution.models.architectures.model_types import ModelType, model_types, reason_unknown
from worker.execution.models.folder_files import read_settings
from worker.execution.refusal import Refusal, names

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
_DECODERS = frozenset({"trocr"})
"""Types with a decoder and no encoder."""
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
        # a saved encoder of two parts says that it has no decoder, and a saved decoder that it is one
        alone = (name == "is_encoder_decoder" and value is False) or (
            name == "is_decoder" and value is True and _is_made_decoder(built)
        )
        if own is _MISSING or alone or _HARMLESS.fullmatch(name) or value in (None, [], {}):
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


def _is_made_decoder(built: Any) -> bool:  # noqa: ANN401 - a configuration of transformers
    """Return whether a type's class for the next token is a decoder, whatever the configuration says."""
    listed, two_parts = model_types().get(built.model_type), declared_fields(built.__class__).get("is_encoder_decoder")
    return (
        listed is not None
        and "causal_lm" in listed.heads
        and (listed.name in _DECODERS or (two_parts is not None and two_parts.default is True))
    )


def _shown(value: object) -> str:
    return repr(value)[:60]


def _is_same(value: Any, own: Any) -> bool:  # noqa: ANN401 - decoded from JSON, and an attribute of transformers
    if isinstance(own, tuple):
        own = list(own)
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (value, own))
    return (numbers or type(value) is type(own)) and bool(value == own)


_MAX_CONFIG_BYTES = 2**20
_MAX_NESTING = 4
"""Objects and lists within each other, the whole file counted as one."""
_ATTENTION = re.compile(r"_?(attn|experts)_implementation\w*")
_IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "paged",
                              "batched_mm", "grouped_mm")  # fmt: skip
_BACKBONE = re.compile(r"backbone(_config|_kwargs)?|use_(timm|pretrained)_backbone|timm_\w+")
_NOT_PASSED = re.compile(
    r"""use_cache|(?!(moe_)?token_dropout$)\w*dropout\w*|\w*_drop|\w*layerdrop|\w*_pdrop|initializer_\w+
    |gradient_checkpointing|output_(attentions|hidden_states|router_logits|scores)
    |return_dict|is_decoder|add_cross_attention|is_encoder_decoder|bos_token_id|out_(features|indices)|_out_\w+
    |stage_names|chunk_size_feed_forward|dtype|label2id|architectures|transformers_version""",
    re.VERBOSE,
)
"""Fields that act in training and generation alone, and those that a task decides."""
_SCALING = frozenset({("pp_lcnet", "hidden_dropout_prob")})
"""Types, and their fields of that kind by which outputs are multiplied in evaluation too."""
_OF_PARTS = frozenset({"linear_attn_config", "sparse_attention_config", "language_config", "whisper_config",
                       "vit_config"})  # fmt: skip
"""Objects that a class makes other fields of, by rules of its own."""
_OF_ALL = frozenset({"vocab_size", "type_vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers"})
"""Fields that no single layer has otherwise."""
_NUMBER = re.compile(r"[0-9]{1,4}")
_TOKENS = frozenset({"pad_token_id", "eos_token_id", "decoder_start_token_id"})
_COMMON = frozenset({"tie_word_embeddings", "is_causal"})


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The architecture that a config describes, as far as it is trusted."""

    model_type: ModelType
    labels: int | None
    class_names: tuple[str, ...]
    end_id: int | None
    """The token that ends a text, where the config or its class names one."""
    configuration: Any
    """transformers' configuration object, built from fields that keep the rules alone."""


def read_architecture(file: OpenFile | None, context: LoaderContext, pointer: str) -> Architecture:
    """Read the architecture in a ``config.json``."""
    config = _read_json(file, pointer)
    name = config.get("model_type")
    model_type = model_types().get(name) if isinstance(name, str) else None
    if model_type is None or not model_type.heads:
        shown = repr(name[:60]) if isinstance(name, str) else "missing"
        refuse(f"`model_type` is {shown}; it {reason_unknown(name)}", pointer)
    kind = CONFIG_MAPPING[model_type.name]
    _require_harmless(config, pointer)
    labels = read_labels(config, context, pointer)
    reader = _Reader(context=context, pointer=pointer)
    with bounded(pointer):
        fields = reader.read(config, kind, "")
        if labels is not None:
            fields["num_labels"] = labels
        configuration = _configured(kind, fields, model_type.name, pointer)
        reader.account(configuration)
    if "head_dim" not in model_type.older:
        _require_divided(configuration, kind, pointer)
    return Architecture(
        model_type=model_type,
        labels=labels,
        class_names=class_names(config.get("id2label")) or class_names(configuration.id2label),
        end_id=_end_id(config, text_part(configuration)),
        configuration=configuration,
    )


def _configured(kind: Any, fields: dict[str, Any], name: str, pointer: str) -> Any:  # noqa: ANN401 - a class of transformers
    try:
        return kind(**fields)
    except Refusal:
        raise
    except Exception as error:  # noqa: BLE001 - another package's code, given a stranger's numbers
        refuse(f"describes no `{name}` ({type(error).__name__}: {_one_line(error)})", pointer)


def text_part(configuration: Any) -> Any:  # noqa: ANN401 - of transformers
    """Return the configuration of a model's part for texts; its own where there is none, or more than one."""
    try:
        return configuration.get_text_config()
    except ValueError:
        return configuration


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@dataclass(kw_only=True)
class _Reader:
    """The reading of a configuration and of those nested in it."""

    context: LoaderContext
    pointer: str
    left: list[tuple[str, dict[str, Any], frozenset[str]]] = field(default_factory=list)
    """Of each configuration its place, its fields, and the names of those that were read."""

    def read(self, config: dict[str, Any], kind: Any, where: str) -> dict[str, Any]:  # noqa: ANN401 - a class of transformers
        """Return the fields of a configuration that keep the rules, the nested ones within."""
        declared = declared_fields(kind)
        listed = model_types().get(kind.model_type)
        older = listed.older if listed else frozenset()
        found: dict[str, Any] = {}
        read = {"model_type", "id2label", "num_labels", "quantization_config", "auto_map"}
        config = self._parts(config, kind, where)
        rotary = "rope_parameters" in declared or bool(older & set(ROTARY))
        if rotary:
            found = read_rotary(config, kind, self.pointer, partial="partial_rotary_factor" in (set(declared) | older))
            read |= set(ROTARY)
        for name, value in config.items():
            canonical = _canonical(name, kind, declared)
            if name in kind.sub_configs:
                if value is not None:
                    found[name] = self._nested(name, value, kind, where)
            elif name == "per_layer_config" and value is not None:
                found[name] = self._layers(value, declared)
            elif name in _TOKENS:
                found |= self._token(name, value, known=canonical in declared)
            elif name in read or (_NOT_PASSED.fullmatch(name) and (kind.model_type, name) not in _SCALING):
                continue
            elif canonical in declared or name in _COMMON or name in older:
                found |= self._plain(name, value, declared.get(canonical))
            else:
                self._require_absolute(name, value)
                continue
            read.add(name)
        self.left.append((where, config, frozenset(read)))
        return found

    def _plain(self, name: str, value: Any, own: Field | None) -> dict[str, Any]:  # noqa: ANN401 - decoded from JSON
        # the declared type of `problem_type` is a function's, which says nothing
        if own is None or name == "problem_type":
            return {name: read_undeclared(name, value, self.pointer)}
        return {own.name: read_value(own, value, self.pointer)}

    def _parts(self, config: dict[str, Any], kind: Any, where: str) -> dict[str, Any]:  # noqa: ANN401 - a class of transformers
        """Return the fields with nested configurations as their older spelling has them, which transformers prefers."""
        older = {part: config.get(f"{part}_dict") for part in kind.sub_configs}
        given = {part: value for part, value in older.items() if value is not None}
        for part in (*given, *(name for name in _OF_PARTS & config.keys() if name not in kind.sub_configs)):
            if part not in given and config[part] not in (None, {}):
                refuse(f"`{where}{part}` is an object that is not read, and would make it another model; load it "
                       "yourself (`source: factory`)", self.pointer, code="unread_field")  # fmt: skip
        return {name: value for name, value in config.items() if name.removesuffix("_dict") not in given} | given

    def account(self, configuration: Any) -> None:  # noqa: ANN401 - a configuration of transformers
        """List the fields that are not read, and refuse those by which the model would be another."""
        for where, config, read in self.left:
            own = configuration
            for part in filter(None, where.split(".")):
                own = getattr(own, part, None)
            if own is not None:
                account_for_fields(config, read, own, self.context, self.pointer)

    def _nested(self, part: str, value: Any, kind: Any, where: str) -> dict[str, Any]:  # noqa: ANN401 - of JSON, and of transformers
        if not isinstance(value, dict):
            refuse(f"`{where}{part}` must be an object", self.pointer)
        own, name = kind.sub_configs[part], None
        if not issubclass(own, transformers.PretrainedConfig):
            spec = kind.sub_configs_defaults.get(part)
            name = value.get("model_type", spec and spec.model_type)
            if not isinstance(name, str) or name not in model_types():
                refuse(f"`model_type` of `{where}{part}` is {_shown(name)}; it {reason_unknown(name)}", self.pointer)
            own = CONFIG_MAPPING[name]
        _require_harmless(value, self.pointer)
        found = self.read(value, own, f"{where}{part}.")
        return found if name is None else found | {"model_type": name}

    def _layers(self, value: Any, declared: Mapping[str, Field]) -> dict[str, dict[str, Any]]:  # noqa: ANN401 - decoded from JSON
        """Return the fields that single layers have otherwise, by the layer's number."""
        whole = isinstance(value, dict) and len(value) <= MAX_DEPTH and all(isinstance(e, dict) for e in value.values())
        if not whole or not all(_NUMBER.fullmatch(key) for key in value):
            refuse(
                f"`per_layer_config` must be fields by the number of a layer, of {MAX_DEPTH:,} at most", self.pointer
            )
        other = [name for fields in value.values() for name in fields if name not in declared or name in _OF_ALL]
        if other:
            refuse(f"`per_layer_config` has {names(other, 3)}, which is not a field of single layers", self.pointer)
        return {
            key: {name: read_value(declared[name], each, self.pointer) for name, each in fields.items()}
            for key, fields in value.items()
        }

    def _token(self, name: str, value: Any, *, known: bool) -> dict[str, Any]:  # noqa: ANN401 - decoded from JSON
        """Return a token's id as a field; nothing where the configuration names none and its class asks for none."""
        # -1 is a common spelling of "none"
        if value is None or value == -1:
            return {name: None} if name == "pad_token_id" and known else {}
        if isinstance(value, list):
            return {name: [read_integer(name, each, 0, 2**22, self.pointer) for each in value[:64]]}
        return {name: read_integer(name, value, 0, 2**22, self.pointer)}

    def _require_absolute(self, name: str, value: Any) -> None:  # noqa: ANN401 - decoded from JSON
        """Refuse positions of a kind that the type once had and has no more."""
        if name == "position_embedding_type" and value not in (None, "absolute"):
            refuse(f"`{name}` is not one of absolute (got {names([str(value)])})", self.pointer)


def _canonical(name: str, kind: Any, declared: Mapping[str, Any]) -> str:  # noqa: ANN401 - a class of transformers
    """Return the name under which a class declares a field that may have another one."""
    aliases = (name, kind.attribute_map.get(name), *(own for own, other in kind.attribute_map.items() if other == name))
    return next((each for each in aliases if each in declared), name)


def _require_harmless(config: dict[str, Any], pointer: str) -> None:
    """Refuse fields by which transformers would fetch or import something, or load another model's part."""
    if config.get("auto_map"):
        refuse(
            "`auto_map` names code that comes with the checkpoint, which is never run; if transformers has this "
            "architecture itself, remove the field, else load the model yourself (`source: factory`)",
            pointer,
        )
    if config.get("quantization_config") is not None:
        refuse("`quantization_config` is set; curvature needs full weights: take the unquantised model", pointer)
    for name, value in config.items():
        if _ATTENTION.fullmatch(name) and value is not None and value not in _IMPLEMENTATIONS:
            refuse(
                f"`{name}` is {_shown(value)}, which would be fetched or imported; remove it, or name one of "
                f"{', '.join(sorted(_IMPLEMENTATIONS))}",
                pointer,
            )
        if _BACKBONE.fullmatch(name) and value not in (None, False, [], {}):
            refuse(f"`{name}` is set; a model that loads another one's part is not read here", pointer)


def _require_divided(configuration: Any, kind: Any, pointer: str) -> None:  # noqa: ANN401 - of transformers
    """Refuse heads that do not divide the width, where nothing else gives a head's width."""
    given = any(re.search(r"head_(dim|size)|d_kv|d_head|kv_channels", name) for name in declared_fields(kind))
    if given or "per_layer_config" in configuration.to_dict() or getattr(configuration, "head_dim", None) is not None:
        return
    fields = configuration.to_dict()
    width, heads = (fields.get(kind.attribute_map.get(each, each)) for each in ("hidden_size", "num_attention_heads"))
    if type(width) is int and type(heads) is int and heads > 0 and width % heads:
        name = kind.attribute_map.get("num_attention_heads", "num_attention_heads")
        refuse(f"`{name}` is {heads}, which does not divide the width {width}", pointer)


def _read_json(file: OpenFile | None, pointer: str) -> dict[str, Any]:
    if file is None:
        refuse("is missing; a checkpoint folder holds config.json and *.safetensors", pointer, code="not_found")
    value = read_settings(file, _MAX_CONFIG_BYTES, partial(refuse, pointer=pointer))
    if not _is_flat(value, _MAX_NESTING):
        refuse(f"has objects or lists more than {_MAX_NESTING} deep", pointer)
    return value


def _is_flat(value: Any, depth: int) -> bool:  # noqa: ANN401 - decoded from JSON
    if not isinstance(value, (dict, list)):
        return True
    return depth > 0 and all(
        _is_flat(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value)
    )


def _end_id(config: dict[str, Any], texts: Any) -> int | None:  # noqa: ANN401 - a configuration of transformers
    given = config.get("eos_token_id")
    given = getattr(texts, "eos_token_id", None) if given is None else given
    first = given[0] if isinstance(given, list) and given else given
    return first if type(first) is int and 0 <= first < (getattr(texts, "vocab_size", None) or 0) else None
