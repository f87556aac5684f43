"""Checkpoint weights: safetensors files fill a built model, by name, strictly.

Every tensor of the model must be there with its shape and finite values, and every tensor of the
files must belong somewhere; what differs legitimately (the base model's prefix, older names, a
head the task does not use) is mapped or said.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import safetensors
import torch
from torch import Tensor, nn

from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.files.safetensors_header import TensorEntry, read_header
from worker.execution.loader_context import LoaderContext
from worker.execution.models.unsaved_state import unsaved_state
from worker.execution.refusal import Refusal, names, unique_keys

_MAX_INDEX_BYTES = 8 * 2**20
_MAX_SHARDS = 512
"""All are open at once."""
_MAX_TENSORS = 100_000
"""Most tensors of all files."""
INDEX = "model.safetensors.index.json"
"""The file that says which file holds which tensor."""
_NUMBERED = re.compile(r".+-\d{1,6}-of-\d{1,6}\.safetensors", re.ASCII)
_SHARD = re.compile(r"([\w\-][\w.\-]{0,199}/){0,4}[\w\-][\w.\-]{0,199}\.safetensors", re.ASCII)
"""A file beside the index or in a folder below it; no part of the name begins with a dot."""
FLOATING = frozenset({"F16", "BF16", "F32", "F64"})
HEADS = ("cls.", "lm_head.", "classifier.", "score.", "qa_outputs.", "pre_classifier.", "vocab_transform.",
          "vocab_layer_norm.", "vocab_projector.", "seq_relationship.", "embed_out.", "pooler.", "lm_predictions.",
         "mask_predictions.", "discriminator_predictions.", "generator_predictions.", "generator_lm_head.",
         "sop_classifier.", "predictions.", "proj_out.", "logit_scale", "visual_projection.", "text_projection.",
         "projector.", "quantizer.", "project_q.", "project_hid.", "classification_head.", "final_logits_bias",
         "head.dense.", "head.norm.", "decoder.bias")  # fmt: skip
_OF_WHOLE_EXAMPLES = re.compile(r"\w+For(Sequence|Image|Audio)Classification")
"""Classes of transformers whose head reads the pooler, where the class builds one."""
# buffers that older versions wrote into the file and that are made anew
_STALE = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias|relative_position_index|relative_coords_table|causal_mask)$"
    r"|(^|\.)(attn|attention)\.bias$"
)
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
    made: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    """Tensors that are made of others as they are read, by name."""

    @property
    def numbers(self) -> int:
        """Elements in all tensors."""
        return sum(entry.numbers for entry in self.entries.values())


def remedy_without(target: str, folder: OpenFolder, what: str, pattern: str, library: str = "") -> str:
    """Return how to save what a folder has no safetensors of: by itself, or from a format that may hold code.

    The line that converts such a format reads it without running any.
    """
    others = [name for name in folder.names() if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if not others:
        return f"save the {what} with `save_pretrained`{library}"
    return (
        f"{names(others)} may hold code, and is never read: save the {what} as safetensors, "
        "as this line does in its folder: "
        'python -c "import glob, torch, safetensors.torch as s; '
        f"d = {{}}; [d.update(torch.load(f, 'cpu', weights_only=True)) for f in sorted(glob.glob('{pattern}'))]; "
        f"s.save_file({{k: v.clone().contiguous() for k, v in d.items()}}, '{target}', {{'format': 'pt'}})\""
    )


def find_weights(folder: OpenFolder, context: LoaderContext, pointer: str) -> CheckpointFiles:
    """Find the safetensors files of a folder, and check every header."""
    whole = folder.file("model.safetensors")
    if whole is not None:
        header = read_header(whole, pointer)
        return CheckpointFiles(entries=header, files=dict.fromkeys(header, whole), read=(whole.name,))
    index = folder.file(INDEX)
    if index is None:
        raise Refusal(_without_weights(folder), pointer=pointer, code="not_found")
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
    below = [shard for shard in shards if "/" in shard]
    if below:
        context.log("info", f"{len(below)} files of weights lie in folders below: {names(below, 2)}")
    return CheckpointFiles(entries=entries, files=files, read=(index.name, *shards))


def _without_weights(folder: OpenFolder) -> str:
    """Return why a folder has no weights that can be read, with the remedy."""
    there = folder.names()
    found = [name for name in there if name.endswith(".safetensors")]
    shards = [name for name in found if _NUMBERED.fullmatch(name)]
    if shards:
        return (
            f"the folder has {names(shards)} and no {INDEX}, which says what the files hold; add the index that "
            "belongs to them, or save the model with `save_pretrained`"
        )
    if found:
        return (
            f"the folder has {names(found)} and no model.safetensors; if a file holds the whole model, rename it to "
            "model.safetensors, else save the model with `save_pretrained`"
        )
    remedy = remedy_without("model.safetensors", folder, "model", "pytorch_model*.bin")
    return f"the folder has no model.safetensors; {remedy}"


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
        raise Refusal(
            f"{index.name} names something that is not a safetensors file beneath its folder", pointer=pointer
        )
    return places


def fill(
    model: nn.Module,
    model_type: str,
    found: CheckpointFiles,
    context: LoaderContext,
    pointer: str,
    brought: Collection[str] = (),
) -> tuple[list[str], frozenset[str]]:
    """Copy a checkpoint's tensors into a model; return the names of unused tensors, and of the state that was filled.

    State that an adapter has ``brought`` may be missing, or have another shape. One tensor is held beyond the model.
    """
    state = model.state_dict()
    current = {
        name: current_name(bare, model_type) for name, bare in bare_names(found.entries, context, found.made).items()
    }
    left = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    places, unused = _places(found.entries, current, state, str(model.base_model_prefix), left, pointer)
    other = [place for place in places if place in brought and found.entries[places[place]].shape != state[place].shape]
    unused += [places.pop(place) for place in other]
    _require_complete(model, state, places, context, pointer, brought)
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
        if name in found.made:
            copy_tensor(state[place], found.made[name](), name, pointer)
            continue
        by_file.setdefault(found.files[name], []).append((place, name))
    for path, pairs in by_file.items():
        with safetensors.safe_open(path, framework="pt") as file:
            for place, name in pairs:
                copy_tensor(state[place], file.get_tensor(name), name, pointer)
    return unused, frozenset(places)


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
    if name in found.made:
        return found.made[name]()
    with safetensors.safe_open(found.files[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def bare_names(
    entries: Mapping[str, TensorEntry], context: LoaderContext, made: Collection[str] = ()
) -> dict[str, str]:
    """Return tensors' names without wrappers' parts, and log that; ``made`` are the model's of what was converted."""
    bare = {name: name.replace("._orig_mod.", ".").removeprefix("_orig_mod.") for name in entries}
    stored = [name for name in bare if name not in made]
    while stored and all(bare[name].startswith("module.") for name in stored):
        bare |= {name: bare[name].removeprefix("module.").removeprefix("_orig_mod.") for name in stored}
    changed = [name for name, now in bare.items() if name != now]
    if changed:
        context.log("info", f"{len(changed)} tensors are read without a wrapper's prefix: {names(changed, 2)}")
    return bare


def _places(
    entries: Mapping[str, TensorEntry],
    names_now: Mapping[str, str],
    state: Mapping[str, Tensor],
    prefix: str,
    left: Sequence[re.Pattern[str]],
    pointer: str,
) -> tuple[dict[str, str], list[str]]:
    """Return the file's name for each tensor of the state, and the names that are not used.

    ``left`` are patterns of names that the model's class leaves to its other half, as an encoder does its decoder's.
    """
    places: dict[str, str] = {}
    unused, unexpected = [], []
    for name in entries:
        current = names_now[name]
        candidates = (current, f"{prefix}.{current}", current.removeprefix(f"{prefix}."))
        place = next((candidate for candidate in candidates if candidate in state), None)
        if place is not None:
            if place in places:
                raise Refusal(f"`{places[place]}` and `{name}` are the same tensor", pointer=pointer)
            if state[place].is_floating_point() and entries[name].dtype not in FLOATING:
                raise Refusal(
                    f"`{name}` is {entries[name].dtype}; curvature needs floating-point weights, not quantised ones",
                    pointer=pointer,
                    code="wrong_dtype",
                )
            if not state[place].is_floating_point() and entries[name].dtype in FLOATING:
                raise Refusal(
                    f"`{name}` is {entries[name].dtype}, and the model counts in whole numbers there; take an intact "
                    "checkpoint",
                    pointer=pointer,
                    code="wrong_dtype",
                )
            places[place] = name
        elif (
            current.removeprefix(f"{prefix}.").startswith(HEADS)
            or _STALE.search(current)
            or any(each.search(current) for each in left)
        ):
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


def current_name(name: str, model_type: str) -> str:
    """Return the name that a tensor of a family has today."""
    for pattern, replacement in (*_OLDER_NAMES[""], *_OLDER_NAMES.get(model_type, ())):
        name = pattern.sub(replacement, name)
    if model_type == "vit":
        for old, new in _VIT_PROJECTIONS:
            name = name.replace(old, new)
    return name


def _require_complete(
    model: nn.Module,
    state: Mapping[str, Tensor],
    places: Mapping[str, str],
    context: LoaderContext,
    pointer: str,
    brought: Collection[str],
) -> None:
    """Every tensor is there, itself or one that it is tied to, or made by the class.

    An absent pooler is taken out, unless the head reads it.
    """
    present = {state[place].data_ptr() for place in places if state[place].numel()}
    missing = [
        name
        for name, tensor in state.items()
        if name not in places
        and name not in brought
        and tensor.data_ptr() not in present
        and not name.endswith("num_batches_tracked")
    ]
    poolers = {name for name in missing if ".pooler." in f".{name}"}
    if not _OF_WHOLE_EXAMPLES.fullmatch(type(model).__name__):
        missing = [name for name in missing if name not in poolers]
    made = unsaved_state(model) if missing else frozenset()
    if made.intersection(missing):
        context.log("info", f"tensors that are not in the files, and always alike: {names(sorted(made & {*missing}))}")
        missing = [name for name in missing if name not in made]
    if missing:
        rest = [name for name in missing if name not in poolers]
        head = bool(rest) and all(name.startswith(HEADS) for name in rest)
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


def copy_tensor(place: Tensor, tensor: Tensor, name: str, pointer: str) -> None:
    """Copy a tensor of a file into its place, and refuse NaN and Inf."""
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        count = int((~torch.isfinite(tensor)).sum())
        raise Refusal(
            f"tensor `{name}` holds {count:,} values that are NaN or Inf; take an intact checkpoint",
            pointer=pointer,
            code="non_finite_model",
        )
    place.copy_(tensor)
