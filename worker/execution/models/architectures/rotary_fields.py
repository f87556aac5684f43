"""Rotary parameters of a foreign configuration: known kinds, plain numbers, one set or one for each type of layers."""

from typing import Any

from worker.execution.models.architectures.config_fields import LAYER_TYPES, read_number, read_undeclared, refuse
from worker.execution.refusal import names

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

    Args:
        config: The fields of a configuration.
        kind: Its class.
        pointer: The field that a refusal names.
        partial: Whether the model reads a share of each head's width that is rotated.
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
