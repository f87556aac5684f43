"""Checkpoints: the state of a collection under way, so that a killed one goes on where it was.

At an interval, between two batches, everything that the rest of the collection depends on is
written into the job's scratch place: every layer's running sums and counts, how far the data is,
the generators' state, buffers the model wrote to, and the state of the collection with the places
of finished factors. The tensors come first, under new names, and the manifest last: it replaces the
one before in one step and names each tensor's digest, so there is always one whole checkpoint, and a
torn one is not a checkpoint. A later attempt passes over the batches that are in it, without the model,
and ends with the same bits.

    find        reads and verifies all of it, and changes nothing
    restore     puts the sums into statistics that are dropped where it fails, and passes over the data
    take_over   generators and buffers, once nothing can fail any more (of several ranks, on none)
    discard     deletes its files, so that nothing of it is left

One that does not belong (another model, data, plan, version, device, number of threads) or does
not read as written is discarded with a line in the log, never trusted.
"""

import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from engine.accumulation.layer_statistics import LayerStatistics
from engine.artifacts import Artifacts, load_sealed, save_sealed
from engine.collection.collection_state import CollectionState, Cursor
from engine.errors import Unwinding
from engine.factors.kronecker_factors import digest
from engine.factors.spilled_factors import SpilledFactors
from engine.model.batches import Batch
from engine.model.sharding.gathered_parameters import present
from engine.model.state.generators import Generators, set_generators
from engine.model.state.model_state import bit_sum, bit_sums, known_checksums
from engine.saved_fields import load_fields, save_fields
from engine.workspace import Workspace

MANIFEST = "checkpoint/checkpoint.json"
_FILE_BYTES = 64 * 2**20
"""A file holds as many tensors as fit, or one that is larger: what reading back holds at once."""
_SHARE = 20
"""No checkpoint sooner than this many times what the last one took: they cost at most 5 % of the time."""
_VERSION = 4


class CheckpointForeign(Unwinding):
    """The data differ from those that a checkpoint was made of."""


@dataclass(kw_only=True)
class CheckpointFiles:
    """Writes the checkpoints of one work, and reads the one that an earlier attempt left."""

    workspace: Workspace
    conditions: Mapping[str, Any]
    """Values that must be equal for a checkpoint to belong: each entry's name says what differs."""
    work: str = "checkpoint"
    """The noun of the work, which names its files too; a collection's are named after the checkpoint itself."""
    clock: Callable[[], float] = time.monotonic
    _serial: int = 0
    _files: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """Labels and digest of the valid checkpoint's tensors, by file."""
    _saved_at: float = 0.0
    _took: float = 0.0

    def __post_init__(self) -> None:
        """Begin the first interval."""
        self._saved_at = self.clock()

    @property
    def _manifest(self) -> str:
        return f"{self.work}/{self.work}.json"

    @property
    def _format(self) -> str:
        return f"kronoscope-{self.work}/{_VERSION}"

    @property
    def _collects(self) -> bool:
        return self.work == "checkpoint"

    @property
    def _scratch(self) -> Artifacts:
        if self.workspace.ports.scratch is None:
            raise ValueError("checkpoints need a scratch place")
        return self.workspace.ports.scratch

    def due(self) -> bool:
        """Whether it is time to save."""
        pause = max(self.workspace.resume.checkpoint_seconds, _SHARE * self._took)
        return self.workspace.saves_checkpoints and self.clock() - self._saved_at >= pause

    def worth(self) -> bool:
        """Whether a checkpoint now costs little against the time since the last, whatever the interval."""
        return self.workspace.saves_checkpoints and self.clock() - self._saved_at >= _SHARE * self._took

    def _opened(self) -> Mapping[str, Any] | None:
        """The manifest of an earlier attempt's checkpoint that belongs here; None where there is none."""
        try:
            body = load_sealed(self._scratch, self._manifest)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise CheckpointForeign(f"it cannot be read ({type(error).__name__})") from error
        if body.get("format") != self._format:
            raise CheckpointForeign("it is of another format")
        here, there = self.conditions, body["conditions"]
        differing = sorted(
            name for name in here.keys() | there.keys() if _canonical(here.get(name)) != _canonical(there.get(name))
        )
        if differing:
            raise CheckpointForeign(f"it was made under another {', another '.join(differing)}")
        return body

    def _read_tensors(self, files: Mapping[str, Sequence[Sequence[str]]]) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Labels and tensor of everything that was written."""
        for file, entries in files.items():
            try:
                stored = self._scratch.load_tensors(file)
            except Exception as error:
                raise CheckpointForeign(f"{file} cannot be read ({type(error).__name__})") from error
            for place, (*labels, written) in enumerate(entries):
                tensor = stored.get(str(place))
                if tensor is None or digest(tensor) != written:
                    raise CheckpointForeign(f"{file} is damaged")
                yield labels, tensor

    def _write(self, entries: Iterable[tuple[Sequence[str], Tensor]], body: Mapping[str, Any], what: str) -> None:
        """Write a checkpoint, its manifest last; where the disk refuses, the one before stays valid."""
        begun, serial, files = self.clock(), self._serial + 1, dict[str, list[list[str]]]()
        of = "" if self._collects else f" of the {self.work}"
        try:
            for place, group in enumerate(_grouped(entries)):
                name = f"{self.work}/{serial}.{place}.safetensors"
                self._scratch.save_tensors(name, {str(key): tensor for key, (_, tensor) in enumerate(group)}, {})
                files[name] = [[*labels, digest(tensor)] for labels, tensor in group]
            sealed = {"format": self._format, "serial": serial, "conditions": self.conditions, **body, "files": files}
            save_sealed(self._scratch, self._manifest, sealed)
        except OSError as error:
            self.workspace.ports.log(
                "warning", f"no checkpoint{of} could be written ({error.strerror}); the one before stands"
            )
        else:
            for name in set(self._files) - set(files):
                self._scratch.remove(name)
            self._serial, self._files = serial, files
            self.workspace.ports.log("debug", f"checkpoint {serial}{what}")
        self._saved_at = self.clock()
        self._took = self._saved_at - begun

    def discard(self, why: str, keep: Collection[str] = ()) -> None:
        """Log that an earlier checkpoint is not used, delete its files, and begin the first interval.

        ``why`` is the end of a sentence; files named in ``keep`` stay.
        """
        of = "" if self._collects else f"'s {self.work}"
        self.workspace.ports.log("warning", f"the checkpoint of an earlier attempt{of} is discarded: {why}")
        try:
            body = self._scratch.load_json(self._manifest)["body"]
            pattern = re.compile(rf"{self.work}/\d+\.\d+\.safetensors")
            names = [*(name for name in body["files"] if pattern.fullmatch(name)), *self._beside(body)]
        except Exception:  # noqa: BLE001 - whatever is wrong with it, nothing of it is read again
            names = list(self._files)
        # without its manifest the rest is not a checkpoint, should this be the last that the attempt does
        for name in (self._manifest, *(name for name in names if name not in keep)):
            self._scratch.remove(name)
        self._serial, self._files = 0, {}
        self._saved_at = self.clock()

    def _beside(self, body: Mapping[str, Any]) -> list[str]:
        """Names of further files that a checkpoint names."""
        del body
        return []


@dataclass(kw_only=True)
class Resumed:
    """A checkpoint, read and verified, without the sums of the pass under way."""

    cursor: Cursor
    state: CollectionState
    """The saved fields of the state alone."""
    stored: Mapping[str, Any]
    """The whole state, as ``CollectionState.state`` returned it."""
    finished: dict[str, dict[str, Any]]
    """Counts of the layers of finished passes."""
    running: dict[str, dict[str, Any]]
    """Counts of the layers of the pass under way."""
    files: dict[str, list[list[str]]]
    """File to (kind, name, field, digest) of its tensors, in order."""
    surroundings: list[tuple[str, str, Tensor]]
    """Generators and buffers, as (kind, name, tensor)."""

    @property
    def common(self) -> tuple[Any, ...]:
        """The values in which every rank's checkpoint of the same moment agrees."""
        state = self.state
        return (self.cursor.number, state.shared, state.unmasked, state.deferred, state.overwritten,
                self.stored["checked"])  # fmt: skip


@dataclass(kw_only=True)
class Checkpoints(CheckpointFiles):
    """Writes one collection's checkpoints, and reads the one that an earlier attempt left."""

    model: nn.Module
    _buffers: dict[str, int] = field(default_factory=dict)
    """Checksums of the model's buffers as the collection found them."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workspace.saves_checkpoints:
            self._buffers = {name: bit_sum(buffer) for name, buffer in self.model.named_buffers()}

    def find(self) -> Resumed | None:
        """Return the checkpoint of an earlier attempt; None without one that belongs and is intact."""
        return self._found(keep=())

    def _found(self, keep: Collection[str]) -> Resumed | None:
        if not self.workspace.saves_checkpoints:
            return None
        try:
            return self._read()
        except CheckpointForeign as foreign:
            self.discard(str(foreign), keep)
            return None

    def under_way(self, number: int, state: CollectionState) -> Resumed | None:
        """Find the checkpoint of a pass that was saved before its end; None of another pass, or of other layers."""
        found = self._found(keep={name for _, each in _spilled(state) for name in each.files})
        if found is None or found.cursor.number != number or not found.running:
            return None
        names = ("shared", "unmasked", "deferred", "overwritten")
        return found if all(getattr(found.state, name) == getattr(state, name) for name in names) else None

    def _read(self) -> Resumed | None:
        """Read the manifest, and verify all that it names."""
        body = self._opened()
        if body is None:
            return None
        try:
            found = Resumed(
                cursor=Cursor(**load_fields(Cursor, body["cursor"])),
                state=CollectionState.read(body["state"]),
                stored=body["state"],
                finished=body["finished"],
                running=body["running"],
                files=body["files"],
                surroundings=[],
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointForeign(f"it does not hold what this version saves ({error})") from error
        for name, spilled in _spilled(found.state):
            if not spilled.intact(self._scratch):
                raise CheckpointForeign(f"the factors of layer `{name}` that waited with it are damaged")
        found.surroundings += [
            (kind, name, tensor) for (kind, name, _), tensor in self._read_tensors(found.files) if kind != "sums"
        ]
        self._serial, self._files = body["serial"], found.files
        return found

    def restore(self, found: Resumed, statistics: Mapping[str, LayerStatistics], stream: Iterator[Batch]) -> Cursor:
        """Put the sums and counts of the pass under way back, and advance the data to where they were saved.

        Nothing else is changed: ``take_over`` does the rest. ``statistics`` are the allocated sums of the layers of the
        pass, which are overwritten; ``stream`` is the data of the pass from its beginning, of which the batches that
        the checkpoint holds are taken. It returns the position at which the checkpoint was saved. ``CheckpointForeign``
        if a tensor does not read as written, or the batches are others than those in the checkpoint; the sums are of no
        use then. One file of tensors is held: 64 MiB, or the largest tensor.
        """
        if found.running and set(found.running) != set(statistics):
            raise CheckpointForeign("it holds other layers")
        for name, stored in found.running.items():
            statistics[name].put_plain(stored)
        for (kind, name, entry), tensor in self._read_tensors(found.files):
            if kind == "sums":
                statistics[name].put(entry, tensor, self.workspace.machine.device)
        self._pass_over(found.cursor, stream)
        return found.cursor

    def take_over(self, found: Resumed) -> None:
        """Set generators and buffers as they were saved; the last step, for passing over the data may draw numbers."""
        for kind, name, tensor in found.surroundings:
            if kind == "buffer":
                self.model.get_buffer(name).data.copy_(tensor)
            else:
                set_generators(Generators.read({name: tensor}), self.workspace.machine.device)

    def _pass_over(self, saved: Cursor, stream: Iterator[Batch]) -> None:
        """Take from the data what the checkpoint holds already, without the model."""
        cursor, ranks = Cursor(number=saved.number), self.workspace.machine.ranks
        for batch in itertools.islice(stream, saved.batches):
            self.workspace.ports.raise_if_cancelled()
            # other ranks wait for this one
            ranks.sign()
            cursor.take(batch, checked=True)
        if (cursor.batches, cursor.data) != (saved.batches, saved.data):
            raise CheckpointForeign("the data are others than before")

    @override
    def _beside(self, body: Mapping[str, Any]) -> list[str]:
        return [name for _, each in _spilled(CollectionState.read(body["state"])) for name in each.files]

    def save(self, cursor: Cursor, running: Sequence[LayerStatistics], state: CollectionState) -> None:
        """Write a checkpoint of a position in a pass and its running sums, of which there are none between two passes.

        It holds one tensor on the host, where the sums are on a device.
        """
        curve, device = self.workspace.machine.curve, self.workspace.machine.device
        curve.sample("checkpoint", "before", device)
        body = {
            "cursor": save_fields(cursor),
            "state": state.state(),
            "finished": {name: each.plain() for name, each in state.statistics.items()},
            "running": {each.layer.name: each.plain() for each in running},
        }
        self._write(self._tensors(running), body, f" after batch {cursor.batches} of pass {cursor.number + 1}")
        curve.sample("checkpoint", "after", device)

    def _tensors(self, running: Sequence[LayerStatistics]) -> Iterator[tuple[tuple[str, str, str], Tensor]]:
        """(kind, name, field) and tensor of everything that is saved."""
        if running:
            # between two passes there is none: each begins with its own
            for name, state in Generators.here(self.workspace.machine.device).tensors().items():
                yield ("generator", name, ""), state
        for name, buffer in self.model.named_buffers():
            if buffer.layout == torch.strided and bit_sum(buffer) != self._buffers.get(name):
                yield ("buffer", name, ""), buffer.detach()
        for each in running:
            for entry, value in each.state().items():
                if isinstance(value, Tensor):
                    yield ("sums", each.layer.name, entry), value


def _spilled(state: CollectionState) -> Iterator[tuple[str, SpilledFactors]]:
    """Every layer's factors on the disk, those of smaller sample sizes among them."""
    yield from state.spilled.items()
    for snapshot in state.nested.values():
        yield from snapshot.spilled.items()


def _grouped(entries: Iterable[tuple[Sequence[str], Tensor]]) -> Iterator[list[tuple[Sequence[str], Tensor]]]:
    """Runs of entries that share a file."""
    group: list[tuple[Sequence[str], Tensor]] = []
    size = 0
    for entry in entries:
        own = entry[1].numel() * entry[1].element_size()
        if group and size + own > _FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(entry)
        size += own
    if group:
        yield group


def fingerprint(model: nn.Module) -> str:
    """Compute the SHA-256, in hexadecimal, over name, type, shape and checksum of each parameter and buffer."""
    named = (*model.named_parameters(), *model.named_buffers())
    known = known_checksums(model)
    sums = [known.get(id(tensor)) for _, tensor in named]
    # one after another: tensors of a sharded model are there in turn
    others = iter(bit_sums(present(tensor) for (_, tensor), found in zip(named, sums, strict=True) if found is None))
    entries = [
        [name, str(tensor.dtype), list(tensor.shape), next(others) if found is None else found]
        for (name, tensor), found in zip(named, sums, strict=True)
    ]
    return hashlib.sha256(_canonical(entries).encode()).hexdigest()


def _canonical(value: object) -> str:
    """Return the one text of what JSON holds."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
