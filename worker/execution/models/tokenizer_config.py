"""Tokenizer configuration: what a checkpoint's folder says of its tokenizer beside ``tokenizer.json``.

``tokenizer.json`` is what tokenises here. ``transformers`` instead builds a tokenizer of a class of its own, of fields
of ``tokenizer_config.json`` and of the class's defaults, and adds tokens that other files list. So what these say goes
to the tokenizer's own process as *claims*, and is held against the file there:

===========  ==================================================================================================
``fields``   values of a normaliser and of the space before a text, with who says so
``frame``    the tokens around a text and the unknown one, where the class builds its template of them
``tokens``   every token that is not to be split: its text, its number and flags if they are given, and where
``split``    whether special tokens in a text are split after all
``fault``    what makes a file unreadable
===========  ==================================================================================================
"""

import contextlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.loader_context import LoaderContext
from worker.execution.models.folder_files import TOKENIZER_FILES
from worker.execution.refusal import is_storable, names, unique_keys

_CONFIG, _MAP, _ADDED = TOKENIZER_FILES
_MOST_BYTES = 16 * 2**20
_NORMALISER = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
_SPACE = "add_prefix_space"
_FRAME = ("cls_token", "sep_token", "unk_token")
_NAMED = (*_FRAME, "bos_token", "eos_token", "pad_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens")
_DECODER = "added_tokens_decoder"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_READ = frozenset(
    {"truncation_side", "split_special_tokens", "tokenizer_class", _SPACE, _DECODER, *_NORMALISER, *_LISTS}
)
_CLASS = re.compile(r"[A-Za-z0-9_]{1,60}Tokenizer(Fast)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The fields that are read."""

    mask_token: str | None = None
    """The text of the mask token."""
    truncation_side: str | None = None
    """`left` or `right`."""
    claims: Mapping[str, Any] = field(default_factory=dict)
    """What the tokenizer's process holds against `tokenizer.json`."""


def read_tokenizer_config(
    folder: OpenFolder, model_type: str, class_name: object, context: LoaderContext
) -> TokenizerConfig:
    """Read what a folder says of its tokenizer.

    Args:
        folder: The checkpoint's folder.
        model_type: `model_type` of its `config.json`, which names a class where nothing else does.
        class_name: `tokenizer_class` of its `config.json`.
        context: Takes the fields and files that are not read.
    """
    try:
        config, special, added = (_read_object(folder.file(name), name) for name in TOKENIZER_FILES)
    except ValueError as error:
        return TokenizerConfig(claims={"fault": str(error)})
    if _DECODER in config:
        # as in transformers, which reads those of old for a folder without it
        for name, value in ((_MAP, special), (_ADDED, added)):
            if value:
                context.unused(f"file {names([name])}")
        special = added = {}
    for name, value in config.items():
        if name not in _READ and (not name.endswith("_token") or isinstance(value, bool)):
            context.unused(f"{_CONFIG}: {names([name])}")
    values = config | special
    side = config.get("truncation_side")
    kind = _class_of(config.get("tokenizer_class") or class_name, model_type)
    return TokenizerConfig(
        mask_token=_content(values.get("mask_token")),
        truncation_side=side if side in ("left", "right") else None,
        claims={
            "fields": dict(_fields(config, kind)),
            "frame": {name: _content(values.get(name)) for name in _FRAME} if _builds_frame(kind) else {},
            "tokens": [each for each in _tokens(config, special, added) if is_storable(each[0])],
            "split": config.get("split_special_tokens") is True,
        },
    )


def _read_object(file: OpenFile | None, name: str) -> dict[str, Any]:
    if file is None:
        return {}
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{name} has more than {_MOST_BYTES:,} bytes")
    try:
        value = json.loads(file.read_bytes(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")  # noqa: TRY004 - a fault of the file
    return value


def _class_of(named: object, model_type: str) -> Any:  # noqa: ANN401 - a class of transformers
    """Return the class that transformers would build, of its own; None for its general one."""
    name = named if isinstance(named, str) else TOKENIZER_MAPPING_NAMES.get(model_type)
    if name is None or not _CLASS.fullmatch(name):
        return None
    with contextlib.suppress(Exception):
        # one that needs a library which is not there
        found = tokenizer_class_from_name(name)
        return found if inspect.isclass(found) and "__init__" in vars(found) else None
    return None


def _fields(config: Mapping[str, Any], kind: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - as above
    """Yield the value of each field, with who says so."""
    parameters = {} if kind is None else inspect.signature(kind.__init__).parameters
    for name in (*_NORMALISER, _SPACE):
        kinds = (bool,) if name == _SPACE else (bool, type(None))
        if isinstance(config.get(name, ""), kinds):
            yield name, (config[name], f"{_CONFIG} says `{name}: {config[name]}`")
        elif name in parameters and name not in config and isinstance(parameters[name].default, kinds):
            default = parameters[name].default
            yield name, (default, f"`{kind.__name__}` has `{name}: {default}` where {_CONFIG} does not say otherwise")


def _builds_frame(kind: Any) -> bool:  # noqa: ANN401 - as above
    """Return whether a class puts `cls_token` before a text and `sep_token` behind it, whatever the file has."""
    with contextlib.suppress(Exception):
        made = kind()
        return bool(made.backend_tokenizer.encode("").tokens == [made.cls_token, made.sep_token])
    return False


def _tokens(
    config: Mapping[str, Any], special: Mapping[str, Any], added: Mapping[str, Any]
) -> Iterator[tuple[str, int | None, dict[str, bool] | None, str]]:
    """Yield each token that transformers adds: its text, number, flags, and the place that says so."""
    decoder = config.get(_DECODER)
    for number, value in decoder.items() if isinstance(decoder, dict) else ():
        content = _content(value)
        if content is not None and isinstance(value, dict) and number.isdecimal():
            flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
            yield content, int(number), flags, f"`{_DECODER}` of {_CONFIG}"
    for content, number in added.items():
        if type(number) is int:
            yield content, number, None, _ADDED
    for file, values in ((_CONFIG, config), (_MAP, special)):
        for name, value in values.items():
            if name in _LISTS:
                several = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            else:
                several = [value] if name.endswith("_token") else ()
            for each in several:
                content = _content(each)
                if content is not None:
                    yield content, None, None, f"`{name}` of {file}"


def _content(token: object) -> str | None:
    """Return the text of a token, which is a string, or an object with it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None
