"""A checkpoint folder in the Hugging Face layout: read by our own rules, never ``from_pretrained``.

Order: bounds of config.json, headers of the files, closed-form size against what the files hold,
and only then is a module built and filled.

``transformers`` makes a BERT tokenizer's normaliser of fields of ``tokenizer_config.json``, whatever
``tokenizer.json`` says. So the two must agree, which the tokenizer's own process looks at.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from catalog.requests.inputs import DirectoryModel, Task
from engine.memory.plan import readable_bytes
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.models.checkpoint_weights import CheckpointFiles, fill, find_weights
from worker.execution.models.config_json import Architecture, read_architecture
from worker.execution.models.folder_files import list_unused_files, require_no_adapter
from worker.execution.refusal import Refusal, names

_MOST_BYTES = 2**20
_NORMALISER = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
_READ = frozenset({"mask_token", "truncation_side", *_NORMALISER})


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The fields that are read."""

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


_MAX_TOKENIZER_BYTES = 64 * 2**20
_AUTO = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "regression": "AutoModelForSequenceClassification",
    "sentence_embedding": "AutoModel",
}
_NUMBER_BYTES = 4
"""A model is loaded in float32."""
_SLACK = 1.02
"""The closed form may exceed what the files hold by this much; beyond it, config.json lies."""


def load(source: DirectoryModel, task: Task, context: LoaderContext) -> LoadedModel:
    """Load the model in a folder that the caller names."""
    folder = context.open_path(source.path, "/model/path")
    if not isinstance(folder, OpenFolder):
        raise Refusal(f"{source.path} is a file; give the folder that holds it", pointer="/model/path")
    return load_checkpoint(folder, task, context, "/model/path")


def load_checkpoint(folder: OpenFolder, task: Task, context: LoaderContext, pointer: str) -> LoadedModel:
    """Build the model in a folder for a task, and fill it."""
    transformers.logging.set_verbosity_error()
    require_no_adapter(folder, pointer)
    architecture = read_architecture(folder.file("config.json"), context, pointer)
    if task.type not in architecture.family.tasks:
        raise Refusal(
            f"a `{architecture.model_type}` does not do `{task.type}`; "
            f"it does {', '.join(sorted(architecture.family.tasks))}",
            pointer="/task/type",
        )
    if context.shapes_only:
        # the closed form has bounded it; what the files hold is looked at when they are read
        with torch.device("meta"):
            model = _build(architecture, task, pointer)
    else:
        model = _filled(folder, architecture, task, context, pointer)
    model.float().eval()
    pad_id = architecture.fields.get("pad_token_id")
    if pad_id is None:
        # a classifier looks for the last token that is not padding; set only now, because an embedding
        # built with a padding index has no gradient for that token
        pad_id = architecture.end_id or 0
        model.config.pad_token_id = pad_id  # type: ignore[union-attr] # every transformers model has one
    vocabulary = None
    if architecture.family.vocabulary:
        tokens = read_tokenizer_config(folder.file("tokenizer_config.json"), context)
        vocabulary = _vocabulary(folder, architecture, model, pad_id, tokens, pointer)
    return LoadedModel(
        model=model,
        vocabulary=vocabulary,
        input_name=None if vocabulary else "pixel_values",
        provenance=f"{architecture.model_type} from {folder.name}",
    )


def _filled(
    folder: OpenFolder, architecture: Architecture, task: Task, context: LoaderContext, pointer: str
) -> nn.Module:
    found = find_weights(folder, pointer)
    list_unused_files(folder, found.read, task, context, images=not architecture.family.vocabulary)
    _require_plausible(architecture, found, pointer)
    context.checkpoint()
    _require_room(architecture, task, context, pointer)
    model = _build(architecture, task, pointer)
    with torch.no_grad():
        unused = fill(model, architecture.model_type, found, context, pointer)
    for name in unused:
        context.unused(f"tensor {names([name])}")
    if unused:
        context.log("info", f"{len(unused)} tensors of the checkpoint are not used by `{task.type}`: {names(unused)}")
    return model


def _require_plausible(architecture: Architecture, found: CheckpointFiles, pointer: str) -> None:
    described = architecture.family.weights(architecture.fields)
    if described > found.numbers * _SLACK:
        raise Refusal(
            f"config.json describes a model of at least {described:,} weights, but the files hold {found.numbers:,}; "
            "config.json and the files belong to different models",
            pointer=pointer,
            code="invalid_config",
        )


def _require_room(architecture: Architecture, task: Task, context: LoaderContext, pointer: str) -> None:
    """Refuse a model that does not fit before a byte of it is taken: a sparse file may declare any size."""
    needed = architecture.family.weights(architecture.fields) * _NUMBER_BYTES
    if needed <= context.most_bytes:
        # the closed form counts no head and no buffer
        with torch.device("meta"):
            model = _build(architecture, task, pointer)
        distinct = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        needed = sum(tensor.numel() * max(_NUMBER_BYTES, tensor.element_size()) for tensor in distinct.values())
    if needed > context.most_bytes:
        raise Refusal(
            f"config.json describes a model of {readable_bytes(needed)} or more in float32, and "
            f"{readable_bytes(context.most_bytes)} of host memory are left to this job; take a smaller model, or "
            "give the job more (`memory.host`)",
            pointer=pointer,
            code="budget_exceeded",
        )


def _build(architecture: Architecture, task: Task, pointer: str) -> nn.Module:
    name = _AUTO[task.type]
    if not architecture.family.vocabulary:
        name = "AutoModelForImageClassification"
    try:
        with torch.random.fork_rng(devices=[]):
            model: nn.Module = getattr(transformers, name).from_config(architecture.configuration)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        raise Refusal(
            f"config.json describes a `{architecture.model_type}` that cannot be built for `{task.type}`: "
            f"{str(error)[:300]}",
            pointer=pointer,
            code="invalid_config",
        ) from error
    return model


def _vocabulary(
    folder: OpenFolder,
    architecture: Architecture,
    model: nn.Module,
    pad_id: int,
    tokens: TokenizerConfig,
    pointer: str,
) -> Vocabulary:
    family, fields = architecture.family, architecture.fields
    tokenizer = folder.file("tokenizer.json")
    if tokenizer is not None and tokenizer.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise Refusal(f"tokenizer.json has more than {_MAX_TOKENIZER_BYTES:,} bytes", pointer=pointer)
    length = fields[family.length] - family.reserved_positions if family.length else None
    return Vocabulary(
        size=fields["vocab_size"],
        max_length=length,
        tokenizer=tokenizer,
        pad_id=pad_id,
        token_types=fields("type_vocab_size") if architecture.model_type == "bert" else 0,
        mask_token=tokens.mask_token,
        truncation_side=tokens.truncation_side,
        normaliser=tokens.normaliser,
        arguments=frozenset(inspect.signature(model.forward).parameters),
        explicit_positions=family.explicit_positions,
    )
