"""A model ready to be measured, with what the data must know about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from worker.execution.files.open_files import ReadableFile


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """How a model that reads tokens wants them."""

    size: int
    """Token ids lie below this."""
    max_length: int | None
    """Positions the model has; null where any length goes."""
    tokenizer: ReadableFile | None
    """`tokenizer.json`; null for a model that reads bytes."""
    pad_id: int = 0
    pad_with: Callable[[int], None] | None = None
    """Makes another token the model's padding; null where its configuration names one."""
    mask_token: str | None = None
    truncation_side: str | None = None
    """The end at which `tokenizer_config.json` has texts cut; null leaves it to `tokenizer.json`."""
    tokenizer_claims: Mapping[str, Any] = field(default_factory=dict)
    """What the files beside `tokenizer.json` say of the tokenizer, which it must agree with."""
    arguments: frozenset[str] = frozenset()
    """Names that ``forward`` takes besides `input_ids`; empty: it takes one tensor of ids."""
    token_types: int = 0
    """Texts of a pair that the model tells apart by `token_type_ids`; 0 where it takes none."""
    pads_left: bool = False
    """Whether padding stands before a text, as where a head takes the last position of a batch."""
    explicit_positions: bool = False
    """Position ids are given, one row per example. By default a model looks up *one* row for the whole
    batch, and the position embedding's gradient then arrives summed over the batch."""
    length_steps: tuple[int, ...] = ()
    """Lengths in tokens beyond each of which the model treats a whole batch otherwise (LongRoPE's frequencies)."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in ``eval()`` on the host."""

    model: nn.Module
    vocabulary: Vocabulary | None = None
    """Null for a model of images or plain numbers."""
    input_name: str | None = None
    """The one input's name where ``forward`` is to be called by name (`pixel_values`)."""
    class_names: tuple[str, ...] = ()
    """Names of the classes by their numbers, as `id2label` has them; empty where there are none."""
    provenance: str = ""
    """Source of the weights, pinned: for the manifest."""
