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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection.checkpoint_files import CheckpointFiles, CheckpointForeign, canonical
from engine.collection.collection_state import CollectionState, Cursor
from engine.factors.spilled_factors import SpilledFactors
from engine.model.batches import Batch
from engine.model.sharding.gathered_parameters import present
from engine.model.state.written_tensors import bit_sum, bit_sums
from engine.saved_fields import load_fields, save_fields

MANIFEST = "checkpoint/checkpoint.json"


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

        Nothing else is changed: ``take_over`` does the rest.

        Args:
            found: The checkpoint.
            statistics: Allocated sums of the layers of the pass, by name, which are overwritten.
            stream: The data of the pass from its beginning; the batches that the checkpoint holds are taken from it.

        Returns:
            The position in the pass at which the checkpoint was saved.

        Raises:
            CheckpointForeign: If a tensor does not read as written, or the batches are others than
                those in the checkpoint; ``statistics`` are of no use then.

        Memory:
            One file of tensors: 64 MiB, or the largest tensor.
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
            elif name == "cuda":
                torch.cuda.set_rng_state(tensor, self.workspace.machine.device)
            else:
                torch.set_rng_state(tensor)

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

        Memory:
            One tensor on the host, where the sums are on a device.
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
            yield ("generator", "cpu", ""), torch.get_rng_state()
            if self.workspace.machine.device.type == "cuda":
                yield ("generator", "cuda", ""), torch.cuda.get_rng_state(self.workspace.machine.device)
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


def fingerprint(model: nn.Module) -> str:
    """Compute a digest of a model's numbers.

    Returns:
        SHA-256, in hexadecimal, over name, type, shape and checksum of every parameter and buffer.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    sums = bit_sums(present(tensor) for _, tensor in named)
    entries = [
        [name, str(tensor.dtype), list(tensor.shape), checksum]
        for (name, tensor), checksum in zip(named, sums, strict=True)
    ]
    return hashlib.sha256(canonical(entries).encode()).hexdigest()
