"""The fields of a ``tokenizer_config.json`` that are read; the others are listed.

``transformers`` makes a BERT tokenizer's normaliser of the fields here, whatever ``tokenizer.json`` says. So the two
must agree, which the tokenizer's own process looks at.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.execution.files.open_files import OpenFile
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import names

_MOST_BYTES = 2**20
_NORMALISER = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
_READ = frozenset({"mask_token", "truncation_side", *_NORMALISER})


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """What is read."""

    mask_token: str | None = None
    """The text of the mask token."""
    truncation_side: str | None = None
    """`left` or `right`."""
    normaliser: Mapping[str, bool | None] = field(default_factory=dict)


def read_tokenizer_config(file: OpenFile | None, context: LoaderContext) -> TokenizerConfig:
    """Read the configuration of a tokenizer."""
    if file is None or file.stat().st_size > _MOST_BYTES:
        return TokenizerConfig()
    try:
        value: Any = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return TokenizerConfig()
    if not isinstance(value, dict):
        return TokenizerConfig()
    for name in value:
        if name not in _READ:
            context.unused(f"tokenizer_config.json: {names([name])}")
    token = value.get("mask_token")
    # a string there, or an object with its content
    content = token.get("content") if isinstance(token, dict) else token
    side = value.get("truncation_side")
    return TokenizerConfig(
        mask_token=content if isinstance(content, str) else None,
        truncation_side=side if side in ("left", "right") else None,
        normaliser={
            name: value[name] for name in _NORMALISER if name in value and isinstance(value[name], (bool, type(None)))
        },
    )
