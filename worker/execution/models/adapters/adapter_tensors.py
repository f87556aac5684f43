"""The tensors of an ``adapter_model.safetensors``: by their names, the parts of each adapted module and whole tensors.

::

    {module}.lora_A.weight, .lora_B.weight, .lora_B.bias     a pair of matrices, (r, in) and (out, r)
    {module}.lora_magnitude_vector                           magnitudes of DoRA, (out,)
    {module}.lora_embedding_A, .lora_embedding_B             a pair of an embedding, (r, entries) and (width, r)
    any other name                                           a tensor of the model itself: of a module that was trained
                                                             as a whole, a bias, or an embedding that was saved
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import safetensors
from torch import Tensor

from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.files.safetensors_header import TensorEntry, read_header
from worker.execution.loader_context import LoaderContext
from worker.execution.models.adapters.adapter_config import CONFIG, MAX_RANK, POINTER, AdapterConfig
from worker.execution.models.checkpoint_weights import HEADS, bare_names, current_name, remedy_without
from worker.execution.refusal import Refusal, names

WEIGHTS = "adapter_model.safetensors"
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))(?:\.default)?(?:\.(?P<of>weight|bias))?"
)
_LABELS = ("classifier.out_proj.weight", "classifier.weight", "score.weight")
"""Weights of a head that have a row for each label."""


@dataclass(kw_only=True)
class Site:
    """One adapted module: the names of its tensors in the file, by their part (``lora_A``, ``lora_B.bias``)."""

    named: str
    """The module's name as the adapter has it."""
    parts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AdapterTensors:
    """The tensors of an adapter, checked by the header alone."""

    file: OpenFile
    entries: Mapping[str, TensorEntry]
    sites: Mapping[str, Site]
    """Adapted modules, by their names."""
    whole: Mapping[str, str]
    """The names of whole tensors in the file, by their names in the model."""

    @property
    def numbers(self) -> int:
        """Elements in all tensors."""
        return sum(entry.numbers for entry in self.entries.values())

    @property
    def labels(self) -> int | None:
        """The number of labels of a head that the adapter brings."""
        heads = (self.entries[self.whole[name]].shape for name in _LABELS if name in self.whole)
        return next((shape[0] for shape in heads if len(shape) == 2), None)

    def tensors(self) -> Mapping[str, Tensor]:
        """Read all tensors, by their names in the file."""
        with safetensors.safe_open(self.file, framework="pt") as file:
            return {name: file.get_tensor(name) for name in self.entries}


def find_tensors(folder: OpenFolder, config: AdapterConfig, context: LoaderContext) -> AdapterTensors:
    """Find the tensors of an adapter, and check names, types and ranks before one is read."""
    file = folder.file(WEIGHTS)
    if file is None:
        remedy = remedy_without(WEIGHTS, folder, "adapter", "adapter_model*.bin", " of peft")
        raise Refusal(f"the adapter's folder has no {WEIGHTS}; {remedy}", pointer=POINTER, code="not_found")
    entries = read_header(file, POINTER)
    sites: dict[str, Site] = {}
    whole: dict[str, str] = {}
    for name, bare in bare_names(entries, context).items():
        own = bare.removeprefix("base_model.model.")
        part = _PART.fullmatch(own)
        if part is not None:
            key = part["part"] + (".bias" if part["of"] == "bias" else "")
            _enter(sites.setdefault(part["module"], Site(named=part["module"])).parts, key, name)
        elif "lora_" in own:
            raise Refusal(
                f"`{name}` of {WEIGHTS} is not a part of one LoRA adapter that is called `default`; save the adapter "
                "by itself",
                pointer=POINTER,
                code="unexpected_tensor",
            )
        else:
            _enter(whole, own.replace(".base_layer.", "."), name)
    for site in sites.values():
        _require_rank(site, entries, config)
    wide = sorted(name for name, entry in entries.items() if entry.dtype == "F64")
    if wide:
        context.notice(f"{len(wide)} tensors of the adapter are float64 and are read as float32: {names(wide)}")
    return AdapterTensors(file=file, entries=entries, sites=sites, whole=whole)


def _enter(places: dict[str, str], place: str, name: str) -> None:
    if place in places:
        raise Refusal(f"`{places[place]}` and `{name}` are the same tensor", pointer=POINTER)
    places[place] = name


def _require_rank(site: Site, entries: Mapping[str, TensorEntry], config: AdapterConfig) -> None:
    first = site.parts.get("lora_A") or site.parts.get("lora_embedding_A")
    shape = () if first is None else entries[first].shape
    rank = shape[0] if shape else 0
    if not 1 <= rank <= MAX_RANK or rank not in config.ranks:
        raise Refusal(
            f"`{site.named}` has matrices of rank {rank:,}, and {CONFIG} says "
            f"{', '.join(f'{each:,}' for each in sorted(config.ranks)[:5])}; take the files that belong together",
            pointer=POINTER,
            code="wrong_shape",
        )


def placed(
    found: Mapping[str, str], places: Mapping[str, object], prefix: str, model_type: str, *, suffix: str
) -> tuple[dict[str, str], list[str]]:
    """Find the places of names in a model: as they are, in today's spelling, or with or without its base's prefix.

    Return the adapter's names by their places, and the names of heads that this task does not have; ``Refusal`` if the
    model lacks a place, or two names lead to one. ``prefix`` names the base within the model of a task
    (`base_model_prefix`), and ``suffix`` completes a module's name to one of a tensor, for the spelling.
    """
    by_place: dict[str, str] = {}
    unused, unexpected = [], []
    for name in found:
        current = (
            current_name(f"{name}{suffix}", model_type).removesuffix(suffix)
            if suffix
            else current_name(name, model_type)
        )
        candidates = (name, current, f"{prefix}.{current}", current.removeprefix(f"{prefix}."))
        place = next((candidate for candidate in candidates if candidate in places), None)
        if place is not None:
            _enter(by_place, place, name)
        elif f"{current.removeprefix(f'{prefix}.')}.".startswith(HEADS):
            unused.append(name)
        else:
            unexpected.append(name)
    if unexpected:
        raise Refusal(
            f"the adapter has tensors for {len(unexpected)} parts that the model does not have: "
            f"{names(sorted(unexpected))}; it belongs to another base, or to another task",
            pointer=POINTER,
            code="unexpected_tensor",
        )
    return by_place, unused
