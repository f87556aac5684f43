"""An ``adapter_config.json``: known fields only, each with its type and bound, and none of them acts as code.

PEFT imports what ``megatron_core`` and ``auto_mapping`` name, matches ``target_modules`` and the keys of the patterns
as regular expressions, unpickles files that CorDA's settings name, and fetches ``base_model_name_or_path``. Here the
names of the tensors say which modules are adapted, and their shapes the ranks.

==============================================  =======================================================
a field                                         what becomes of it
==============================================  =======================================================
of the adapter's function (`lora_alpha`, …)     read, strictly
of where it came from, or of training alone     not read
of another method than LoRA, rsLoRA and DoRA    refused where it is set
that is not known                               listed where it is off, else refused
==============================================  =======================================================
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from worker.execution.files.open_files import OpenFile
from worker.execution.loader_context import LoaderContext
from worker.execution.models.folder_files import read_settings
from worker.execution.refusal import Refusal, names

CONFIG = "adapter_config.json"
POINTER = "/model/adapter"
MAX_RANK = 8_192
_MOST_BYTES = 2**20
_MOST_RANKS = 100_000
_MOST_NAMES = 1_000
"""Most names in a list, and patterns of `alpha_pattern`: each is held against every module."""
_MOST_ALPHA = 1e6
MERGE = (
    "merge it into the weights with peft (`merge_and_unload`, then `save_pretrained`), or measure the model in your "
    "own process (`kronoscope.local.measure`)"
)
_IGNORED = frozenset(
    {"auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
     "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
     "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"}
)  # fmt: skip
_READ = frozenset(
    {"alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "lora_bias", "modules_to_save", "peft_type", "r",
     "rank_pattern", "use_dora", "use_rslora"}
)  # fmt: skip
_OTHER_METHODS = frozenset(
    {"alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "kasa_config", "layer_replication",
     "megatron_config", "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora",
     "velora_config"}
)  # fmt: skip
_BASE_KEPT = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base's weights as they are, and both matrices trainable."""
_NAME = re.compile(r"\^?(?:[\w\-.]|\\\.)+\$?", re.ASCII)
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The fields that are read."""

    rank: int
    ranks: frozenset[int]
    """Every rank that a module may have."""
    alpha: float
    alpha_pattern: Mapping[str, float]
    """Other values of `lora_alpha`, by the end of a module's name; the first that fits holds."""
    rank_stabilised: bool
    """Whether the product is scaled by α / √r (rsLoRA) in place of α / r."""
    decomposed: bool
    """Whether rows of the sum have a magnitude of their own (DoRA)."""
    lora_bias: bool
    """Whether the second matrix of a pair has a bias."""
    bias: Literal["none", "all", "lora_only"]
    """The biases of the model that are trained beside the adapter."""
    modules_to_save: tuple[str, ...]
    """Ends of the names of modules that are trained as a whole."""
    target_modules: tuple[str, ...] | None
    """Modules that are adapted, where they are all that says it; only for a notice."""
    base: str | None
    """The model that the adapter was trained on, by its own word."""
    sha256: str

    def scaling(self, module_names: tuple[str, ...], rank: int) -> float:
        """Return the number that a module's product of matrices is multiplied by."""
        fits = (each for each in self.alpha_pattern if any(_fits(each, name) for name in module_names))
        pattern = next(fits, None)
        alpha = self.alpha if pattern is None else self.alpha_pattern[pattern]
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def read_adapter_config(file: OpenFile | None, sha256: str, context: LoaderContext) -> AdapterConfig:
    """Read the configuration of an adapter; ``sha256`` is the digest of its bytes."""
    if file is None:
        _refuse("is missing; an adapter's folder holds it and adapter_model.safetensors", "not_found")
    config = read_settings(file, _MOST_BYTES, _refuse)
    kind = config.get("peft_type")
    if kind != "LORA":
        shown = repr(kind[:60]) if isinstance(kind, str) else "missing"
        _refuse(f"`peft_type` is {shown}, and only LORA (with rsLoRA and DoRA) is applied; {MERGE}", "adapter_type")
    for name in sorted(_OTHER_METHODS & config.keys()):
        if config[name] not in _OFF:
            _refuse(f"`{name}` is set, which is not LoRA, rsLoRA or DoRA; {MERGE}", "adapter_type")
    for name in sorted(config.keys() - _IGNORED - _READ - _OTHER_METHODS):
        if config[name] not in _OFF:
            _refuse(f"{names([name])} is set and not known, so it might make another model; {MERGE}", "unread_field")
        context.unused(f"{CONFIG}: {names([name])}")
    initial = config.get("init_lora_weights", True)
    if initial is not None and (type(initial) not in (bool, str) or initial not in _BASE_KEPT):
        shown = repr(initial)[:60]
        _refuse(f"`init_lora_weights` is {shown}, which changes the base or freezes a part: {MERGE}", "adapter_type")
    rank = _integer("r", config.get("r", 8), MAX_RANK)
    if config.get("use_dora") is True and config.get("lora_bias") is True:
        _refuse("`use_dora` and `lora_bias` are both set, which no adapter of peft has")
    return AdapterConfig(
        rank=rank,
        ranks=frozenset({rank, *(_integer("rank_pattern", each, MAX_RANK) for each in _ranks(config))}),
        alpha=_alpha("lora_alpha", config.get("lora_alpha", 8)),
        alpha_pattern=_alpha_pattern(config),
        rank_stabilised=_flag(config, "use_rslora"),
        decomposed=_flag(config, "use_dora"),
        lora_bias=_flag(config, "lora_bias"),
        bias=_bias(config),
        modules_to_save=_texts("modules_to_save", config.get("modules_to_save") or []),
        target_modules=_targets(config),
        base=_base(config),
        sha256=sha256,
    )


def _ranks(config: Mapping[str, Any]) -> list[Any]:
    return list(_pattern(config, "rank_pattern", _MOST_RANKS).values())


def _pattern(config: Mapping[str, Any], name: str, most: int) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict) or len(value) > most:
        _refuse(f"`{name}` must be an object of at most {most:,} entries")
    return value


def _alpha_pattern(config: Mapping[str, Any]) -> dict[str, float]:
    pattern = {
        key: _alpha("alpha_pattern", value) for key, value in _pattern(config, "alpha_pattern", _MOST_NAMES).items()
    }
    wrong = [key for key in pattern if len(key) > 512 or not _NAME.fullmatch(key)]
    if wrong:
        _refuse(f"`alpha_pattern` has {names(wrong, 1)}, a regular expression, which is not evaluated; write out the "
                f"names of the modules, or {MERGE}", "adapter_type")  # fmt: skip
    return pattern


def _fits(pattern: str, name: str) -> bool:
    r"""Return whether a pattern of `alpha_pattern` ends a module's name, as ``(.*\.)?(pattern)$`` would match.

    It holds letters, digits, ``_``, ``-`` and dots alone, so every character stands for one: a dot for any.
    """
    whole = pattern.startswith("^")
    # an escaped dot is a dot, which no letter below is
    wanted = list(pattern.removeprefix("^").removesuffix("$").replace("\\.", "\0"))
    end = name[-len(wanted) :] if len(wanted) <= len(name) else ""
    before = name[: len(name) - len(wanted)]
    if len(end) != len(wanted) or (before and (whole or not before.endswith("."))):
        return False
    return all(one in (".", other) or (one == "\0" and other == ".") for one, other in zip(wanted, end, strict=True))


def _texts(name: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401 - decoded from JSON
    if not isinstance(value, list) or len(value) > _MOST_NAMES or not all(isinstance(each, str) for each in value):
        _refuse(f"`{name}` must be a list of at most {_MOST_NAMES:,} names")
    if not all(1 <= len(each) <= 512 for each in value):
        _refuse(f"`{name}` holds a name of no letter, or of more than 512")
    return tuple(value)


def _targets(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    value = config.get("target_modules")
    others = ("exclude_modules", "layers_to_transform", "layers_pattern")
    if not isinstance(value, list) or any(config.get(name) not in _OFF for name in others):
        return None
    if len(value) > _MOST_NAMES:
        return None
    return _texts("target_modules", value)


def _base(config: Mapping[str, Any]) -> str | None:
    value = config.get("base_model_name_or_path")
    return value[:500] if isinstance(value, str) and value else None


def _bias(config: Mapping[str, Any]) -> Literal["none", "all", "lora_only"]:
    value = config.get("bias", "none")
    if value not in ("none", "all", "lora_only"):
        _refuse(f"`bias` must be none, all or lora_only (got {repr(value)[:60]})")
    return value  # type: ignore[no-any-return] # it is one of them


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if not isinstance(value, (bool, type(None))):
        _refuse(f"`{name}` must be true or false (got {repr(value)[:60]})")
    return bool(value)


def _integer(name: str, value: Any, most: int) -> int:  # noqa: ANN401 - decoded from JSON
    if type(value) is not int or not 1 <= value <= most:
        _refuse(f"`{name}` must be an integer from 1 to {most:,} (got {repr(value)[:40]})")
    return value


def _alpha(name: str, value: Any) -> float:  # noqa: ANN401 - decoded from JSON
    if type(value) not in (int, float) or not -_MOST_ALPHA <= value <= _MOST_ALPHA:
        _refuse(f"`{name}` must be a number of at most {_MOST_ALPHA:,.0f} (got {repr(value)[:40]})")
    return float(value)


def _refuse(message: str, code: str = "invalid_config") -> NoReturn:
    raise Refusal(f"{CONFIG}: {message}", pointer=POINTER, code=code)
