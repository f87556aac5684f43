"""An adapter of a checkpoint: LoRA, rsLoRA or DoRA, found beside no weights, checked, and applied to a filled model.

Order: the configuration, names and shapes of the file's header, the modules that the names mean, and only then tensors.
What PEFT trains is trainable afterwards, and nothing else; of a merged adapter every parameter of the model is.
"""

import hashlib
import posixpath
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from catalog.frames import AppliedAdapter
from catalog.requests.inputs import AdaptableModel, HuggingFaceModel, is_path
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.files.safetensors_header import TensorEntry
from worker.execution.loader_context import LoaderContext
from worker.execution.models.adapters.adapted_layers import (
    AdaptedConv2d,
    AdaptedEmbedding,
    AdaptedLayer,
    AdaptedLinear,
    DecomposedLinear,
)
from worker.execution.models.adapters.adapter_config import (
    CONFIG,
    MERGE,
    POINTER,
    AdapterConfig,
    read_adapter_config,
)
from worker.execution.models.adapters.adapter_tensors import WEIGHTS, AdapterTensors, Site, find_tensors, placed
from worker.execution.models.checkpoint_weights import FLOATING, copy_tensor
from worker.execution.models.folder_files import list_data_files
from worker.execution.models.hub_store import open_snapshot, snapshot
from worker.execution.refusal import Refusal, names


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter that is to be applied, as its configuration and the header of its file describe it."""

    name: str
    """The adapter's folder, or its name on the hub with the commit."""
    base: str
    """The model that it is applied to, by the same rule."""
    folder: Path
    config: AdapterConfig
    tensors: AdapterTensors
    merged: bool

    def brought(self, model: nn.Module, model_type: str) -> frozenset[str]:
        """Return the names of a model's state that the adapter has whole tensors for."""
        state = model.state_dict()
        return frozenset(placed(self.tensors.whole, state, _prefix(model), model_type, suffix="")[0])

    def record(self, base_sha256: str | None) -> AppliedAdapter:
        """Return what the job's manifest says of the adapter."""
        return AppliedAdapter(
            base=self.base,
            base_sha256=base_sha256,
            adapter=self.name,
            config_sha256=self.config.sha256,
            weights_sha256=_digest(self.tensors.file),
            merged=self.merged,
        )


def open_adapter(source: AdaptableModel, base: str, context: LoaderContext) -> Adapter | None:
    """Open the adapter that a model's source names for ``base``, and read no tensor; None where it names none.

    ``Refusal`` if there is none, it is of another method, or configuration and tensors contradict each other.
    """
    if source.adapter is None:
        return None
    folder, name = _folder(source.adapter, source.adapter_revision, context)
    file = folder.file(CONFIG)
    config = read_adapter_config(file, "" if file is None else _digest(file), context)
    tensors = find_tensors(folder, config, context)
    for each in list_data_files(folder):
        if each not in (CONFIG, WEIGHTS):
            context.unused(f"file {names([f'{folder.name}/{each}'])} of the adapter")
    if config.base is not None and _last(config.base) not in (_last(base), _last(base.partition(" at commit ")[0])):
        context.notice(
            f"{CONFIG} names the base {names([config.base])}, which is not followed, and the adapter is applied to "
            f"{names([base])}: where these are other weights, what is measured is not the model that was trained"
        )
    return Adapter(
        name=name, base=base, folder=folder.path, config=config, tensors=tensors, merged=source.adapter_merged
    )


def _folder(adapter: str, revision: str | None, context: LoaderContext) -> tuple[OpenFolder, str]:
    if is_path(adapter):
        found = context.open_path(adapter, POINTER)
        if not isinstance(found, OpenFolder):
            raise Refusal(f"{found.name} is a file; give the folder that holds it", pointer=POINTER)
        return found, found.name
    source = HuggingFaceModel(source="huggingface", id=adapter, revision=revision)
    try:
        # its tensors' names are needed for a plan too
        folder = snapshot(source, replace(context, shapes_only=False))
    except Refusal as refusal:
        pointer = "/model/adapter_revision" if refusal.pointer == "/model/revision" else POINTER
        folder_is = f"; a folder is written ./{adapter}" if refusal.code == "not_fetched" else ""
        raise type(refusal)(refusal.message + folder_is, pointer=pointer, code=refusal.code) from refusal
    name = f"{adapter} at commit {folder.name}"
    context.log("info", f"adapter {name}")
    return open_snapshot(folder, context, POINTER), name


def _last(name: str) -> str:
    return posixpath.basename(name.rstrip("/")).casefold()


def _digest(file: OpenFile) -> str:
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _prefix(model: nn.Module) -> str:
    return str(getattr(model, "base_model_prefix", ""))


def apply_adapter(model: nn.Module, adapter: Adapter, model_type: str, context: LoaderContext) -> None:
    """Apply an adapter in place to a checkpoint's model, on the host or meta device, and set what is trainable.

    ``Refusal`` if the model has no such modules, or a tensor has another shape or holds NaN or Inf.
    """
    sites, tensors, config = adapter.tensors.sites, adapter.tensors, adapter.config
    modules = dict(model.named_modules(remove_duplicate=False))
    at, unused = placed(dict.fromkeys(sites, ""), modules, _prefix(model), model_type, suffix=".weight")
    whole, unused_whole = placed(tensors.whole, model.state_dict(), _prefix(model), model_type, suffix="")
    for name in (*unused, *unused_whole):
        context.unused(f"adapter tensor {names([name])}")
    saved = _saved_modules(modules, config, whole)
    _require_apart(modules, at, saved)
    _say_missing({name: each for name, each in modules.items() if not _within(name, saved)}, config, at, context)
    read = {} if context.shapes_only else tensors.tensors()
    model.requires_grad_(requires_grad=False)
    _copy_whole(
        model, {place: tensors.whole[name] for place, name in whole.items()}, saved, tensors.entries, read, context
    )
    layers: dict[str, AdaptedLayer] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for place, name in at.items():
            layers[place] = _adapted(modules[place], place, sites[name], adapter)
            _fill(layers[place], sites[name], tensors, read)
    tied = _tied(model)
    for place, layer in layers.items():
        if adapter.merged:
            _merge(place, layer, tied, context)
        else:
            owner, _, last = place.rpartition(".")
            setattr(modules[owner], last, layer)
    if adapter.merged:
        model.requires_grad_()
    else:
        _train(model, layers, saved, config, set(whole), context)
    kind = "DoRA" if config.decomposed else "rsLoRA" if config.rank_stabilised else "LoRA"
    how = "merged into" if adapter.merged else "beside"
    context.log("info", f"{kind} adapter {adapter.name}: {how} {len(layers)} modules, {tensors.numbers:,} numbers")


def _saved_modules(modules: Mapping[str, nn.Module], config: AdapterConfig, whole: Mapping[str, str]) -> list[str]:
    """Return the modules that were trained as a whole; each of their tensors must be there."""
    found = [name for name in modules if name and name.endswith(config.modules_to_save)]
    missing = [
        f"{name}.{key}"
        for name in found
        for key in modules[name].state_dict()
        if f"{name}.{key}" not in whole and not key.endswith("num_batches_tracked")
    ]
    if missing:
        raise Refusal(
            f"`modules_to_save` of {CONFIG} means modules of which the file lacks {len(missing)} tensors: "
            f"{names(missing)}; take the files that belong together",
            pointer=POINTER,
            code="missing_tensor",
        )
    return found


def _require_apart(modules: Mapping[str, nn.Module], at: Mapping[str, str], saved: list[str]) -> None:
    """Refuse modules that the model has under two names, or that are adapted and trained as a whole."""
    counts = Counter(map(id, modules.values()))
    shared = [place for place in at if counts[id(modules[place])] > 1]
    if shared:
        raise Refusal(
            f"{names(shared)} stand at several places of the model, of which the adapter names one; {MERGE}",
            pointer=POINTER,
            code="adapter_type",
        )
    both = [place for place in at if _within(place, saved)]
    if both:
        raise Refusal(
            f"{names(both)} are adapted, and trained as a whole by `modules_to_save`; {MERGE}",
            pointer=POINTER,
            code="adapter_type",
        )


def _within(place: str, saved: list[str]) -> bool:
    """Return whether a module is one of those that were trained as a whole, or a part of one."""
    return f"{place}.".startswith(tuple(f"{name}." for name in saved))


def _say_missing(
    modules: Mapping[str, nn.Module], config: AdapterConfig, at: Mapping[str, str], context: LoaderContext
) -> None:
    """Say which modules the configuration names and the file has nothing for: peft begins those anew."""
    ends = tuple(f".{each}" for each in config.target_modules or ())
    missing = [
        name
        for name, module in modules.items()
        if name not in at
        and f".{name}".endswith(ends)
        and isinstance(module, (nn.Linear, Conv1D, nn.Embedding, nn.Conv2d))
    ]
    if ends and missing:
        context.notice(
            f"`target_modules` of {CONFIG} means {len(missing)} modules that the file has no tensors for, and they are "
            f"not adapted: {names(missing)}"
        )


def _adapted(module: nn.Module, place: str, site: Site, adapter: Adapter) -> AdaptedLayer:
    """Make the adapted layer in the place of a module; its tensors are still to be filled."""
    config, entries = adapter.config, adapter.tensors.entries
    first = site.parts.get("lora_A") or site.parts["lora_embedding_A"]
    rank = entries[first].shape[0]
    scaling = config.scaling((place, site.named), rank)
    if type(module) is nn.Linear or isinstance(module, Conv1D):
        if config.decomposed:
            return DecomposedLinear(module, rank, scaling)
        return AdaptedLinear(module, rank, scaling, bias=config.lora_bias)
    plain = not config.decomposed
    if plain and isinstance(module, nn.Embedding) and not config.lora_bias:
        if type(module) is nn.Embedding or hasattr(module, "embed_scale"):
            return AdaptedEmbedding(module, rank, scaling)
    elif plain and type(module) is nn.Conv2d and module.groups == 1 and set(module.dilation) == {1}:
        return AdaptedConv2d(module, rank, scaling, bias=config.lora_bias)
    kind = f"{'DoRA' if config.decomposed else 'LoRA'}{' with a bias' if config.lora_bias else ''}"
    raise Refusal(
        f"{kind} of `{place}`, a {type(module).__name__}, is not applied ({module.extra_repr()[:200]}); {MERGE}",
        pointer=POINTER,
        code="adapter_type",
    )


def _fill(layer: AdaptedLayer, site: Site, tensors: AdapterTensors, read: Mapping[str, Tensor]) -> None:
    places = layer.places()
    if places.keys() != site.parts.keys():
        raise Refusal(
            f"`{site.named}` has {names(sorted(site.parts))} in the file, and {CONFIG} and the model ask for "
            f"{names(sorted(places))}",
            pointer=POINTER,
            code="missing_tensor",
        )
    for part, name in site.parts.items():
        _require_place(name, tensors.entries[name], places[part])
        if read:
            copy_tensor(places[part], read[name], name, POINTER)


def _require_place(name: str, entry: TensorEntry, place: Tensor) -> None:
    """Refuse a tensor that has another shape or kind of numbers than its place."""
    if place.is_floating_point() != (entry.dtype in FLOATING):
        raise Refusal(
            f"`{name}` of the adapter is {entry.dtype}, and the model has {place.dtype}; take an intact adapter",
            pointer=POINTER,
            code="wrong_dtype",
        )
    if entry.shape != tuple(place.shape):
        raise Refusal(
            f"`{name}` of the adapter is {list(entry.shape)} where the model has {list(place.shape)}; it belongs to "
            "another base",
            pointer=POINTER,
            code="wrong_shape",
        )


def _copy_whole(
    model: nn.Module,
    whole: Mapping[str, str],
    saved: list[str],
    entries: Mapping[str, TensorEntry],
    read: Mapping[str, Tensor],
    context: LoaderContext,
) -> None:
    """Copy whole tensors into the model; those of modules that were trained as a whole are tied to no other."""
    state = model.state_dict(keep_vars=True)
    within = tuple(f"{name}." for name in saved)
    tied = _tied(model)
    untied = []
    for place, name in whole.items():
        target = state[place]
        if place in tied and place.startswith(within):
            target = nn.Parameter(target.detach().clone(), requires_grad=False)
            owner, _, last = place.rpartition(".")
            setattr(model.get_submodule(owner), last, target)
            untied.append(place)
        _require_place(name, entries[name], target)
        if read:
            with torch.no_grad():
                copy_tensor(target, read[name], name, POINTER)
    if untied:
        context.notice(
            f"{names(untied)} are trained by the adapter, so they are no longer tied to what config.json ties them to, "
            "as in peft"
        )


def _tied(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters that have another name besides."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(tensor), []).append(name)
    return frozenset(name for found in by_tensor.values() if len(found) > 1 for name in found)


def _merge(place: str, layer: AdaptedLayer, tied: frozenset[str], context: LoaderContext) -> None:
    """Put the sum into the layer's own weight; a weight that is tied is untied by it."""
    if f"{place}.weight" in tied:
        context.notice(f"`{place}.weight` is no longer tied: the adapter is merged into it alone")
    bias = layer.places().get("lora_B.bias")
    if bias is not None and layer.bias is None:
        raise Refusal(
            f"`{place}` has no bias that the adapter's could be added to; leave `adapter_merged` out",
            pointer="/model/adapter_merged",
            code="adapter_type",
        )
    with torch.no_grad():
        layer.base_layer.register_parameter("weight", nn.Parameter(layer.merged_weight().contiguous()))
        if bias is not None and layer.bias is not None:
            layer.bias.add_(bias * layer.scaling)


def _train(
    model: nn.Module,
    layers: Mapping[str, AdaptedLayer],
    saved: list[str],
    config: AdapterConfig,
    whole: set[str],
    context: LoaderContext,
) -> None:
    """Set what PEFT trains: the adapter, modules that were trained as a whole, and the biases that it says."""
    for layer in layers.values():
        for name, parameter in layer.named_parameters():
            parameter.requires_grad = not name.startswith("base_layer.")
    for name in saved:
        model.get_submodule(name).requires_grad_()
    biases = {
        name: parameter
        for name, parameter in model.named_parameters()
        if (name == "bias" or name.endswith(".bias")) and ".lora_B." not in name
    }
    if config.bias == "lora_only":
        biases = {name: each for name, each in biases.items() if name.removesuffix(".base_layer.bias") in layers}
    elif config.bias == "none":
        biases = {}
    absent = [name for name in biases if name.replace(".base_layer.", ".") not in whole]
    if absent:
        context.notice(
            f"`bias` of {CONFIG} is {config.bias}, and the file has nothing for {len(absent)} biases, which stay those "
            f"of the base: {names(absent)}"
        )
    for parameter in biases.values():
        parameter.requires_grad_()
