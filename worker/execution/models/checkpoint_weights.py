"""Checkpoint weights: safetensors files fill a built model, by name, strictly.

Every tensor of the model must be there with its shape and finite values, and every tensor of the
files must belong somewhere; what differs legitimately (the base model's prefix, older names, a
head the task does not use) is mapped or said.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import safetensors
import torch
from torch import Tensor, nn

from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.files.safetensors_header import TensorEntry, read_header
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal, names, unique_keys

_MAX_INDEX_BYTES = 8 * 2**20
_MAX_SHARDS = 512
"""All are open at once."""
_MAX_TENSORS = 100_000
"""Most tensors of all files."""
_SHARD = re.compile(r"[\w.\-]{1,200}\.safetensors", re.ASCII)
_FLOATING = frozenset({"F16", "BF16", "F32", "F64"})
_HEADS = ("cls.", "lm_head.", "classifier.", "score.", "qa_outputs.", "pre_classifier.", "vocab_transform.",
          "vocab_layer_norm.", "vocab_projector.", "seq_relationship.", "embed_out.", "pooler.")  # fmt: skip
# buffers that older versions wrote into the file and that are made anew
_STALE = re.compile(r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias)$|(^|\.)(attn|attention)\.bias$")
_OLDER_NAMES = {
    "gpt_neox": ((re.compile(r"^embed_out\."), "lm_head."),),
    "": ((re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"), (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias")),
    "vit": (
        (re.compile(r"encoder\.layer\.(\d+)\."), r"layers.\1."),
        (re.compile(r"attention\.attention\.(query|key|value)\."), r"attention.\1_proj."),
        (re.compile(r"attention\.output\.dense\."), "attention.o_proj."),
        (re.compile(r"intermediate\.dense\."), "mlp.fc1."),
        (re.compile(r"(?<!attention\.)output\.dense\."), "mlp.fc2."),
    ),
}
_VIT_PROJECTIONS = (("query_proj", "q_proj"), ("key_proj", "k_proj"), ("value_proj", "v_proj"))


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """The tensors of a checkpoint, and the file that holds each."""

    entries: Mapping[str, TensorEntry]
    files: Mapping[str, OpenFile]
    read: tuple[str, ...]
    """Names of the files."""

    @property
    def numbers(self) -> int:
        """Elements in all tensors."""
        return sum(entry.numbers for entry in self.entries.values())


def find_weights(folder: OpenFolder, pointer: str) -> CheckpointFiles:
    """Find the safetensors files of a folder, and check every header."""
    whole = folder.file("model.safetensors")
    if whole is not None:
        header = read_header(whole, pointer)
        return CheckpointFiles(entries=header, files=dict.fromkeys(header, whole), read=(whole.name,))
    index = folder.file("model.safetensors.index.json")
    if index is None:
        others = [name for name in folder.names() if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        remedy = (
            f"{names(others)} may hold code, and is never read: save the model as safetensors"
            if others
            else ("save the model with `save_pretrained`")
        )
        raise Refusal(f"the folder has no model.safetensors; {remedy}", pointer=pointer, code="not_found")
    entries: dict[str, TensorEntry] = {}
    files: dict[str, OpenFile] = {}
    places = _weight_map(index, pointer)
    shards = sorted(set(places.values()))
    for shard in shards:
        file = folder.file(shard)
        if file is None:
            raise Refusal(f"{index.name} names `{shard}`, which is not in the folder", pointer=pointer)
        header = read_header(file, pointer)
        twice = sorted(header.keys() & entries.keys())
        if twice:
            raise Refusal(f"two files hold {names(twice)}", pointer=pointer, code="broken_safetensors")
        entries.update(header)
        if len(entries) > _MAX_TENSORS:
            raise Refusal(f"the files hold more than {_MAX_TENSORS:,} tensors", pointer=pointer)
        files.update(dict.fromkeys(header, file))
    absent = sorted(name for name in places if name not in entries)
    if absent:
        raise Refusal(
            f"{index.name} names {len(absent)} tensors that the files do not hold: {names(absent)}; take the files "
            "that belong to it",
            pointer=pointer,
            code="missing_tensor",
        )
    return CheckpointFiles(entries=entries, files=files, read=(index.name, *shards))


def _weight_map(index: OpenFile, pointer: str) -> dict[str, str]:
    """The file of each tensor, by the index."""
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise Refusal(f"{index.name} has more than {_MAX_INDEX_BYTES:,} bytes", pointer=pointer)
    try:
        places = dict(json.loads(index.read_bytes(), object_pairs_hook=unique_keys)["weight_map"])
        shards = set(places.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(f"{index.name} has no readable `weight_map`", pointer=pointer) from error
    if len(shards) > _MAX_SHARDS:
        raise Refusal(f"{index.name} names {len(shards):,} files; at most {_MAX_SHARDS} are read", pointer=pointer)
    if not shards or any(not isinstance(shard, str) or not _SHARD.fullmatch(shard) for shard in shards):
        raise Refusal(f"{index.name} names something that is not a safetensors file beside it", pointer=pointer)
    return places


def fill(model: nn.Module, model_type: str, found: CheckpointFiles, context: LoaderContext, pointer: str) -> list[str]:
    """Copy a checkpoint's tensors into a model.

    Memory:
        One tensor beyond the model itself.
    """
    state = model.state_dict()
    current = _current_names(found.entries, model_type, context)
    places, unused = _places(found.entries, current, state, str(model.base_model_prefix), pointer)
    _require_complete(model, state, places, pointer)
    wrong = [
        f"`{name}` is {list(found.entries[name].shape)} where config.json says {list(state[place].shape)}"
        for place, name in places.items()
        if found.entries[name].shape != tuple(state[place].shape)
    ]
    if wrong:
        raise Refusal(
            f"{len(wrong)} tensors have another shape: {'; '.join(wrong[:3])}", pointer=pointer, code="wrong_shape"
        )
    if _untie_differing(model, state, places, found, context):
        state = model.state_dict()
    wide = sorted(name for name in places.values() if found.entries[name].dtype == "F64")
    if wide:
        context.notice(f"{len(wide)} tensors are float64 in the files and are read as float32: {names(wide)}")
    by_file: dict[OpenFile, list[tuple[str, str]]] = {}
    for place, name in places.items():
        by_file.setdefault(found.files[name], []).append((place, name))
    for path, pairs in by_file.items():
        with safetensors.safe_open(path, framework="pt") as file:
            for place, name in pairs:
                _copy(state[place], file.get_tensor(name), name, pointer)
    return unused


def _untie_differing(
    model: nn.Module,
    state: Mapping[str, Tensor],
    places: Mapping[str, str],
    found: CheckpointFiles,
    context: LoaderContext,
) -> bool:
    """Give tensors that the configuration ties a memory of their own where the files hold both, and they differ.

    So does transformers: such a configuration contradicts the files, and the files are what was trained.
    """
    tied: dict[int, list[str]] = {}
    for place in places:
        if state[place].numel():
            tied.setdefault(state[place].data_ptr(), []).append(place)
    untied = False
    for first, *others in tied.values():
        for other in others:
            one, two = (_tensor(found, places[each]).to(torch.float32) for each in (first, other))
            if torch.equal(one, two):
                continue
            owner, _, name = other.rpartition(".")
            setattr(model.get_submodule(owner), name, nn.Parameter(state[other].clone()))
            untied = True
            context.notice(
                f"config.json ties {names([other])} to {names([first])}, and the files hold both with different "
                "numbers: they are measured untied, as transformers loads them; write `tie_word_embeddings: false` if "
                "that is meant"
            )
    return untied


def _tensor(found: CheckpointFiles, name: str) -> Tensor:
    with safetensors.safe_open(found.files[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _current_names(entries: Mapping[str, TensorEntry], model_type: str, context: LoaderContext) -> dict[str, str]:
    """The names that tensors have today, without what wrappers put before or between them."""
    bare = {name: name.replace("._orig_mod.", ".").removeprefix("_orig_mod.") for name in entries}
    while all(name.startswith("module.") for name in bare.values()) and bare:
        bare = {name: now.removeprefix("module.").removeprefix("_orig_mod.") for name, now in bare.items()}
    changed = [name for name, now in bare.items() if name != now]
    if changed:
        context.log("info", f"{len(changed)} tensors are read without a wrapper's prefix: {names(changed, 2)}")
    return {name: _current_name(now, model_type) for name, now in bare.items()}


def _places(
    entries: Mapping[str, TensorEntry],
    names_now: Mapping[str, str],
    state: Mapping[str, Tensor],
    prefix: str,
    pointer: str,
) -> tuple[dict[str, str], list[str]]:
    """Return the file's name for each tensor of the state, and the names that are not used."""
    places: dict[str, str] = {}
    unused, unexpected = [], []
    for name in entries:
        current = names_now[name]
        candidates = (current, f"{prefix}.{current}", current.removeprefix(f"{prefix}."))
        place = next((candidate for candidate in candidates if candidate in state), None)
        if place is not None:
            if place in places:
                raise Refusal(f"`{places[place]}` and `{name}` are the same tensor", pointer=pointer)
            if state[place].is_floating_point() and entries[name].dtype not in _FLOATING:
                raise Refusal(
                    f"`{name}` is {entries[name].dtype}; curvature needs floating-point weights, not quantised ones",
                    pointer=pointer,
                    code="wrong_dtype",
                )
            if not state[place].is_floating_point() and entries[name].dtype in _FLOATING:
                raise Refusal(
                    f"`{name}` is {entries[name].dtype}, and the model counts in whole numbers there; take an intact "
                    "checkpoint",
                    pointer=pointer,
                    code="wrong_dtype",
                )
            places[place] = name
        elif current.removeprefix(f"{prefix}.").startswith(_HEADS) or _STALE.search(current):
            unused.append(name)
        else:
            unexpected.append(name)
    if unexpected:
        raise Refusal(
            f"the files hold {len(unexpected)} tensors that the model of this config.json does not have: "
            f"{names(sorted(unexpected))}",
            pointer=pointer,
            code="unexpected_tensor",
        )
    return places, sorted(unused)


def _current_name(name: str, model_type: str) -> str:
    for pattern, replacement in (*_OLDER_NAMES[""], *_OLDER_NAMES.get(model_type, ())):
        name = pattern.sub(replacement, name)
    if model_type == "vit":
        for old, new in _VIT_PROJECTIONS:
            name = name.replace(old, new)
    return name


def _require_complete(model: nn.Module, state: Mapping[str, Tensor], places: Mapping[str, str], pointer: str) -> None:
    """Every tensor is there, itself or one that it is tied to; an absent pooler is taken out."""
    present = {state[place].data_ptr() for place in places if state[place].numel()}
    missing = [
        name
        for name, tensor in state.items()
        if name not in places and tensor.data_ptr() not in present and not name.endswith("num_batches_tracked")
    ]
    poolers = [name for name in missing if ".pooler." in f".{name}"]
    missing = [name for name in missing if name not in poolers]
    if missing:
        head = all(name.startswith(_HEADS) for name in missing)
        remedy = (
            "this task needs that head: take a checkpoint trained for it, or another task"
            if head
            else "the checkpoint is incomplete, or config.json belongs to another model"
        )
        raise Refusal(
            f"{len(missing)} tensors are missing from the files: {names(sorted(missing))}; {remedy}",
            pointer=pointer,
            code="missing_head" if head else "missing_tensor",
        )
    if poolers:
        for module in model.modules():
            if getattr(module, "pooler", None) is not None:
                module.register_module("pooler", None)


def _copy(place: Tensor, tensor: Tensor, name: str, pointer: str) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        count = int((~torch.isfinite(tensor)).sum())
        raise Refusal(
            f"tensor `{name}` holds {count:,} values that are NaN or Inf; take an intact checkpoint",
            pointer=pointer,
            code="non_finite_model",
        )
    place.copy_(tensor)
