"""A checkpoint folder in the Hugging Face layout: read by our own rules, never ``from_pretrained``.

Order: bounds of config.json, headers of the files, the model on the meta device within its bounds, its size against
what the files hold and the job may take, and only then is a module built and filled.
"""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from catalog.requests.inputs import DirectoryModel, Task, UploadedModel
from engine.memory.plan import readable_bytes
from worker.execution.data.byte_count import no_room
from worker.execution.data.labels import class_names
from worker.execution.files.open_files import OpenFolder
from worker.execution.input_digests import weights_digest
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.models.adapters.adapter import Adapter, apply_adapter, open_adapter
from worker.execution.models.architectures.bounded_build import bounded
from worker.execution.models.architectures.config_fields import MAX_LABELS
from worker.execution.models.architectures.config_json import Architecture, read_architecture, text_part
from worker.execution.models.architectures.head_fields import account_for_problem
from worker.execution.models.checkpoint_weights import CheckpointFiles, bare_names, fill, find_weights
from worker.execution.models.converted_tensors import convert
from worker.execution.models.folder_files import list_unused_files, require_no_adapter
from worker.execution.models.tokenizer_config import TokenizerConfig, read_tokenizer_config
from worker.execution.models.unsaved_state import unsaved_numbers
from worker.execution.refusal import Refusal, names

_MAX_TOKENIZER_BYTES = 64 * 2**20
_NUMBER_BYTES = 4
"""A model is loaded in float32."""
_SLACK = 1.02
"""The model may exceed what the files hold by this much, beyond what is tied; beyond it, config.json lies."""
_MOST_TIED = 8
"""Modules of one weight that are built before they are tied."""
_PADDED_LEFT = frozenset({"xlnet"})
"""Types whose classifier takes the last position of a batch, whatever stands there."""
_EXPLICIT_POSITIONS = frozenset({"bert", "distilbert", "gpt2"})
"""Types that look up one row of positions for a whole batch unless each example gives its own."""


def load(source: DirectoryModel, task: Task, context: LoaderContext) -> LoadedModel:
    """Load the model in a folder that the caller names."""
    folder = context.open_path(source.path, "/model/path")
    if not isinstance(folder, OpenFolder):
        raise Refusal(f"{source.path} is a file; give the folder that holds it", pointer="/model/path")
    return load_checkpoint(folder, task, context, "/model/path", open_adapter(source, folder.name, context))


def load_uploaded(source: UploadedModel, task: Task, context: LoaderContext) -> LoadedModel:
    """Load a model of which the parent has laid out the files."""
    adapter = open_adapter(source, "the upload", context)
    return load_checkpoint(context.upload("model"), task, context, "/model/id", adapter)


def load_checkpoint(
    folder: OpenFolder, task: Task, context: LoaderContext, pointer: str, adapter: Adapter | None = None
) -> LoadedModel:
    """Build the model in a folder for a task, fill it, and apply an adapter."""
    transformers.logging.set_verbosity_error()
    require_no_adapter(folder, pointer)
    architecture = read_architecture(folder.file("config.json"), context, pointer)
    if adapter is not None:
        architecture = _take_labels(adapter, architecture, context)
    model_type = architecture.model_type
    if task.type not in model_type.tasks:
        raise Refusal(
            f"a `{model_type.name}` does not do `{task.type}`; it does {', '.join(model_type.tasks)}",
            pointer="/task/type",
        )
    account_for_problem(architecture.configuration, task, context)
    if context.shapes_only:
        # what the files hold is looked at when they are read
        with bounded(pointer), torch.device("meta"):
            model = _build(architecture, task, pointer)
    else:
        model = _filled(folder, architecture, task, context, pointer, adapter)
    model.float()
    if adapter is not None:
        apply_adapter(model, adapter, model_type.name, context)
    model.eval()
    pad_id, named = _padding(model, architecture)
    _pad_with(model, pad_id)
    vocabulary = None
    if model.main_input_name == "input_ids":
        tokens = read_tokenizer_config(
            folder, model_type.name, getattr(architecture.configuration, "tokenizer_class", None), context
        )
        vocabulary = _vocabulary(folder, architecture, model, pad_id, tokens, pointer)
        if not named:
            vocabulary = replace(vocabulary, pad_with=partial(_pad_with, model))
    return LoadedModel(
        model=model,
        vocabulary=vocabulary,
        input_name=None if vocabulary else str(model.main_input_name),
        class_names=architecture.class_names,
        provenance=f"{model_type.name} from {folder.name}"
        + ("" if adapter is None else f" with the adapter {adapter.name}"),
    )


def _padding(model: nn.Module, architecture: Architecture) -> tuple[int, bool]:
    """Return the token that pads, and whether the configuration names it."""
    whole: Any = model.config
    given = (getattr(config, "pad_token_id", None) for config in (text_part(whole), whole))
    named = next((each for each in given if isinstance(each, int)), None)
    return (architecture.end_id or 0, False) if named is None else (named, True)


def _pad_with(model: nn.Module, pad_id: int) -> None:
    """Let a classifier, which looks for the last token that is not padding, know the padding.

    Only in a model that is built: an embedding built with a padding index has no gradient for that token.
    """
    whole: Any = model.config
    for config in (whole, text_part(whole)):
        # what is kept for the next token is of no use to a pass, and some models refuse it
        config.use_cache, config.pad_token_id = False, pad_id


def _take_labels(adapter: Adapter, architecture: Architecture, context: LoaderContext) -> Architecture:
    """Let a head that the adapter brings say how many labels there are, as a base without that head does not know."""
    labels = adapter.tensors.labels
    if labels is not None and labels != architecture.configuration.num_labels and 1 <= labels <= MAX_LABELS:
        architecture.configuration.num_labels = labels
        context.log("info", f"{labels:,} labels, as the head of the adapter has")
        # names of classes are those of the head that it replaces
        return replace(architecture, labels=labels, class_names=class_names(architecture.configuration.id2label))
    return architecture


def _filled(
    folder: OpenFolder,
    architecture: Architecture,
    task: Task,
    context: LoaderContext,
    pointer: str,
    adapter: Adapter | None,
) -> nn.Module:
    found = find_weights(folder, context, pointer)
    # an adapter's tensors are held twice while they are copied
    beside = 0 if adapter is None else 2 * _NUMBER_BYTES * adapter.tensors.numbers
    most_bytes = context.most_bytes - beside
    bare = _described(architecture, task, found, replace(context, most_bytes=most_bytes), pointer)
    images, applied = bare.main_input_name == "pixel_values", None if adapter is None else adapter.folder
    list_unused_files(folder, found.read, task, context, images=images, applied=applied)
    context.checkpoint()
    found = convert(found, bare_names(found.entries, replace(context, log=_quiet)), bare, context, pointer)
    with bounded(pointer, of_meta=False):
        model = _build(architecture, task, pointer)
    name = architecture.model_type.name
    brought = frozenset() if adapter is None else adapter.brought(model, name)
    with torch.no_grad():
        unused, filled = fill(model, name, found, context, pointer, brought)
    for name in unused:
        context.unused(f"tensor {names([name])}")
    if unused:
        context.log("info", f"{len(unused)} tensors of the checkpoint are not used by `{task.type}`: {names(unused)}")
    if adapter is not None:
        context.adapted(adapter.record(weights_digest(model.float()) if brought <= filled else None))
    return model


def _quiet(*_: object) -> None:
    """Leave it to the next reader of these names to say what it says."""


def _described(
    architecture: Architecture, task: Task, found: CheckpointFiles, context: LoaderContext, pointer: str
) -> nn.Module:
    """Build the model on the meta device, and hold its size against the files and the job's memory.

    A sparse file may declare any size, so a model that does not fit is refused before a byte of it is taken.
    """

    def excess(numbers: int) -> Refusal:
        least = numbers * _NUMBER_BYTES
        return _too_large(least, context, pointer) if least > context.most_bytes else _other_model(found, pointer)

    most = min(found.numbers, context.most_bytes // _NUMBER_BYTES) * _MOST_TIED
    with bounded(pointer, most, excess), torch.device("meta"):
        model = _build(architecture, task, pointer)
    distinct = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    needed = sum(each.numel() * max(_NUMBER_BYTES, each.element_size()) for each in distinct.values())
    if needed > context.most_bytes:
        raise _too_large(needed, context, pointer)
    own = sum(each.numel() for each in model.parameters()) - unsaved_numbers(model)
    if own > found.numbers * _SLACK + _head_numbers(model):
        raise _other_model(found, pointer)
    return model


def _head_numbers(model: nn.Module) -> int:
    """Return the numbers outside the base model, whose absence from the files is said by their names."""
    base = getattr(model, str(model.base_model_prefix), None)
    inside = {id(each) for each in base.parameters()} if isinstance(base, nn.Module) else set()
    return sum(each.numel() for each in model.parameters() if inside and id(each) not in inside) + sum(
        each.numel() for name, each in model.named_parameters() if ".pooler." in f".{name}"
    )


def _other_model(found: CheckpointFiles, pointer: str) -> Refusal:
    return Refusal(
        f"config.json describes a model of more weights than the {found.numbers:,} in the files; config.json and "
        "the files belong to different models",
        pointer=pointer,
        code="invalid_config",
    )


def _too_large(needed: int, context: LoaderContext, pointer: str) -> Refusal:
    taken = f"config.json describes a model of {readable_bytes(needed)} or more in float32"
    return no_room(taken, context.most_bytes, pointer, "take a smaller model, or give the job more (`memory.host`)")


def _build(architecture: Architecture, task: Task, pointer: str) -> nn.Module:
    auto = architecture.model_type.auto_class(task.type)
    try:
        with torch.random.fork_rng(devices=[]):
            model: nn.Module = getattr(transformers, str(auto)).from_config(architecture.configuration)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(
            f"config.json describes a `{architecture.model_type.name}` that cannot be built for `{task.type}` "
            f"({type(error).__name__}): {' '.join(str(error).split())[:300]}",
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
    tokenizer = folder.file("tokenizer.json")
    if tokenizer is not None and tokenizer.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise Refusal(f"tokenizer.json has more than {_MAX_TOKENIZER_BYTES:,} bytes", pointer=pointer)
    config: Any = model.config
    fields = text_part(config)
    arguments = frozenset(inspect.signature(model.forward).parameters)
    types = getattr(fields, "type_vocab_size", None) or 0
    return Vocabulary(
        size=int(getattr(fields, "vocab_size", None) or _rows(model, pointer)),
        max_length=_positions(model, fields),
        tokenizer=tokenizer,
        pad_id=pad_id,
        token_types=types if "token_type_ids" in arguments and types > 1 else 0,
        mask_token=tokens.mask_token,
        truncation_side=tokens.truncation_side,
        tokenizer_claims=tokens.claims,
        arguments=arguments,
        pads_left=architecture.model_type.name in _PADDED_LEFT,
        explicit_positions=architecture.model_type.name in _EXPLICIT_POSITIONS,
        length_steps=_length_steps(model),
    )


def _length_steps(model: nn.Module) -> tuple[int, ...]:
    """Return the lengths beyond which LongRoPE takes its long factors, by the longest text of a batch."""
    found = set()
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
        if not isinstance(parameters, dict):
            continue
        # one for the module, or one for each type of its layers
        pairs = [(kinds, parameters)] if isinstance(kinds, str) else []
        if isinstance(kinds, dict):
            pairs = [(kind, parameters.get(layers) or {}) for layers, kind in kinds.items()]
        found |= {own["original_max_position_embeddings"] for kind, own in pairs if kind == "longrope"}
    return tuple(sorted(found))


def _rows(model: nn.Module, pointer: str) -> int:
    """Return how many words a model knows that has no field for it."""
    try:
        table: Any = model.get_input_embeddings()  # type: ignore[operator] # every transformers model has it
    except NotImplementedError as error:
        raise Refusal(
            "config.json: names no `vocab_size`, and the model has no table of words; load it yourself "
            "(`source: factory`)",
            pointer=pointer,
            code="invalid_config",
        ) from error
    return int(table.num_embeddings)


def _positions(model: nn.Module, fields: Any) -> int | None:  # noqa: ANN401 - a configuration of transformers
    """Return the tokens that a text may have, without positions that no token can take; None where any number may."""
    most = getattr(fields, "max_position_embeddings", None)
    if type(most) is not int or most <= 0:
        return None
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    # with a padding index, the first token stands behind it
    padded = [each for each in tables if type(each) is nn.Embedding and each.padding_idx is not None]
    reserved = (padded[0].padding_idx or 0) + 1 if padded and padded[0].num_embeddings == most else 0
    return most - reserved
