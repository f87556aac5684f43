"""Checkpoints: the state of a collection under way, so that a killed one goes on where it was.

At an interval, between two batches, everything that the rest of the collection depends on is
written into the job's scratch place: every layer's running sums and counts, how far the data is,
the generators' state, buffers the model wrote to, and which finished factors wait there. The
tensors come first, under new names, and the manifest last: it replaces the one before in one step
and names each tensor's digest, so there is always one whole checkpoint, and a torn one is no
checkpoint. A later attempt passes over the batches that are in it, without the model, and ends
with the same bits.

One that does not belong (another model, data, plan, version, device, number of threads) or does
not read as written is discarded with a line in the log, never trusted.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection.collection_state import CollectionState, Cursor, Snapshot, bit_sum
from engine.collection.statistics_state import counts, put, set_counts, state_of
from engine.errors import Unwinding
from engine.factors.factor_set import LayerSums, TiedSums
from engine.factors.kronecker_factors import digest
from engine.factors.spilled_factors import SpilledFactors
from engine.model.batches import Batch
from engine.model.sharding.gathered_parameters import present
from engine.row_layout.attention_masks import Key
from engine.workspace import Artifacts, Workspace

FORMAT = "kronoscope-checkpoint/3"
MANIFEST = "checkpoint/checkpoint.json"
_FILE_BYTES = 64 * 2**20
"""A file holds as many tensors as fit, or one that is larger: what reading back holds at once."""
_SHARE = 20
"""No checkpoint sooner than this many times what the last one took: they cost at most 5 % of the time."""


class CheckpointForeign(Unwinding):
    """The data differ from those that a checkpoint was made of."""


@dataclass(kw_only=True)
class Resumed:
    """A checkpoint, read and verified, without the sums of the pass under way."""

    cursor: Cursor
    passes: int
    shared: dict[str, str]
    unmasked: frozenset[Key]
    deferred: frozenset[str]
    finished: dict[str, dict[str, Any]]
    """Counts of the layers of finished passes."""
    spilled: dict[str, SpilledFactors]
    """Factors of finished passes."""
    nested: dict[int, Snapshot]
    nondeterministic: tuple[str, ...]
    """Smaller sample sizes that have been kept."""
    running: dict[str, dict[str, Any]]
    """Counts of the layers of the pass under way."""
    self_check: dict[str, Any]
    """Checks of the layers, as ``SelfCheck.state`` returns them."""
    files: dict[str, list[list[str]]]
    """File to (kind, name, field, digest) of its tensors, in order."""


@dataclass(kw_only=True)
class Checkpoints:
    """Writes one collection's checkpoints, and reads the one that an earlier attempt left."""

    workspace: Workspace
    model: nn.Module
    conditions: Mapping[str, Any]
    """Values that must be equal for a checkpoint to belong: each entry's name says what differs."""
    clock: Callable[[], float] = time.monotonic
    _serial: int = 0
    _files: tuple[str, ...] = ()
    """Files of the valid checkpoint."""
    _saved_at: float = 0.0
    _took: float = 0.0
    _buffers: dict[str, int] = field(default_factory=dict)
    """Checksums of the model's buffers as the collection found them."""

    def __post_init__(self) -> None:
        """Begin the first interval."""
        self._saved_at = self.clock()
        if self.workspace.saves_checkpoints:
            self._buffers = {name: bit_sum(buffer) for name, buffer in self.model.named_buffers()}

    @property
    def _scratch(self) -> Artifacts:
        if self.workspace.ports.scratch is None:
            raise ValueError("checkpoints need a scratch place")
        return self.workspace.ports.scratch

    def find(self) -> Resumed | None:
        """Return the checkpoint of an earlier attempt; None without one that belongs and is intact."""
        if not self.workspace.saves_checkpoints:
            return None
        try:
            return self._read()
        except FileNotFoundError:
            return None
        except CheckpointForeign as foreign:
            self.discard(str(foreign))
            return None

    def under_way(self, number: int, state: CollectionState) -> Resumed | None:
        """Find the checkpoint of one pass that this attempt or an earlier one has saved before the pass ended.

        Args:
            number: The pass, from 0.
            state: State of the collection, whose shared and unmasked layers the checkpoint must agree with.

        Returns:
            The checkpoint; None where there is none of this pass, or it was made of other layers.
        """
        found = self.find()
        inside = found is not None and found.cursor.number == number and bool(found.running)
        if not inside or found is None:
            return None
        alike = (found.shared, found.unmasked, found.deferred) == (
            state.shared,
            state.unmasked,
            state.deferred,
        )
        return found if alike else None

    def _read(self) -> Resumed:
        """Read the manifest.

        Raises:
            FileNotFoundError: If there is none.
            CheckpointForeign: If it is of no use here; the message says why.
        """
        try:
            stored = self._scratch.load_json(MANIFEST)
            body, written = stored["body"], stored["sha256"]
        except FileNotFoundError:
            raise
        except Exception as error:
            raise CheckpointForeign(f"it cannot be read ({type(error).__name__})") from error
        if _sha256(body) != written:
            raise CheckpointForeign("it is damaged")
        if body.get("format") != FORMAT:
            raise CheckpointForeign("it is of another format")
        here, there = self.conditions, body["conditions"]
        differing = sorted(
            name for name in here.keys() | there.keys() if _canonical(here.get(name)) != _canonical(there.get(name))
        )
        if differing:
            raise CheckpointForeign(f"it was made under another {', another '.join(differing)}")
        found = Resumed(
            cursor=Cursor(**body["cursor"]),
            passes=body["passes"],
            shared=body["shared"],
            unmasked=frozenset((name, number) for name, number in body["unmasked"]),
            deferred=frozenset(body["deferred"]),
            finished=body["finished"],
            spilled={name: SpilledFactors(**spilled) for name, spilled in body["spilled"].items()},
            nondeterministic=tuple(body["nondeterministic"]),
            nested={entry["eighths"]: _snapshot(entry) for entry in body["nested"]},
            running=body["running"],
            self_check=body["self_check"],
            files=body["files"],
        )
        kept = [entry for snapshot in found.nested.values() for entry in snapshot.spilled.items()]
        for name, spilled in (*found.spilled.items(), *kept):
            if not self._stands(spilled):
                raise CheckpointForeign(f"the factors of layer `{name}` that waited with it are damaged")
        self._serial, self._files = body["serial"], tuple(found.files)
        return found

    def restore(self, found: Resumed, statistics: Mapping[str, LayerStatistics], stream: Iterator[Batch]) -> Cursor:
        """Put the sums and counts of the pass under way back, and advance the data to where they were saved.

        Generators and buffers come last: passing over the data may draw numbers.

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
            set_counts(statistics[name], stored)
        surroundings: list[tuple[str, str, Tensor]] = []
        for kind, name, entry, tensor in self._read_tensors(found):
            if kind == "sums":
                put(statistics[name], entry, tensor, self.workspace.machine.device)
            else:
                surroundings.append((kind, name, tensor))
        self._pass_over(found.cursor, stream)
        for kind, name, tensor in surroundings:
            if kind == "buffer":
                self.model.get_buffer(name).data.copy_(tensor)
            elif name == "cuda":
                torch.cuda.set_rng_state(tensor, self.workspace.machine.device)
            else:
                torch.set_rng_state(tensor)
        return found.cursor

    def _read_tensors(self, found: Resumed) -> Iterator[tuple[str, str, str, Tensor]]:
        for file, entries in found.files.items():
            try:
                stored = self._scratch.load_tensors(file)
            except Exception as error:
                raise CheckpointForeign(f"{file} cannot be read ({type(error).__name__})") from error
            for place, (kind, name, entry, written) in enumerate(entries):
                tensor = stored.get(str(place))
                if tensor is None or digest(tensor) != written:
                    raise CheckpointForeign(f"{file} is damaged")
                yield kind, name, entry, tensor

    def _pass_over(self, saved: Cursor, stream: Iterator[Batch]) -> None:
        """Take from the data what the checkpoint holds already, without the model."""
        cursor = Cursor(number=saved.number)
        for batch in itertools.islice(stream, saved.batches):
            self.workspace.ports.raise_if_cancelled()
            cursor.take(batch, checked=True)
        if (cursor.batches, cursor.data) != (saved.batches, saved.data):
            raise CheckpointForeign("the data are others than before")

    def discard(self, why: str) -> None:
        """Log that an earlier checkpoint is not used, and begin the first interval.

        Args:
            why: The reason, as the end of a sentence.
        """
        self.workspace.ports.log("warning", f"the checkpoint of an earlier attempt is discarded: {why}")
        self._saved_at = self.clock()

    def due(self) -> bool:
        """Whether it is time to save."""
        pause = max(self.workspace.resume.checkpoint_seconds, _SHARE * self._took)
        return self.workspace.saves_checkpoints and self.clock() - self._saved_at >= pause

    def worth(self) -> bool:
        """Whether a checkpoint now costs little against the time since the last, whatever the interval."""
        return self.workspace.saves_checkpoints and self.clock() - self._saved_at >= _SHARE * self._took

    def save(self, cursor: Cursor, running: Sequence[LayerStatistics], state: CollectionState) -> None:
        """Write a checkpoint, its manifest last; where the disk refuses, the one before stays valid.

        Args:
            cursor: Position in the pass under way.
            running: Sums of that pass; empty between two passes.
            state: State of the collection.

        Memory:
            One tensor on the host, where the sums are on a device.
        """
        begun = self.clock()
        serial = self._serial + 1
        try:
            self.workspace.machine.curve.sample("checkpoint", "before", self.workspace.machine.device)
            files = self._write_tensors(serial, running)
            body = {
                "format": FORMAT,
                "serial": serial,
                "conditions": self.conditions,
                "cursor": asdict(cursor),
                "passes": state.passes,
                "shared": state.shared,
                "unmasked": sorted(state.unmasked),
                "deferred": sorted(state.deferred),
                "finished": {name: counts(each) for name, each in state.statistics.items()},
                "spilled": {name: asdict(each) for name, each in state.spilled.items()},
                "nondeterministic": sorted(state.nondeterministic),
                "nested": [asdict(each) for each in state.nested.values()],
                "running": {each.layer.name: counts(each) for each in running},
                "self_check": {} if state.self_check is None else state.self_check.state(),
                "files": files,
            }
            self._scratch.save_json(MANIFEST, {"body": body, "sha256": _sha256(body)})
        except OSError as error:
            self.workspace.ports.log(
                "warning", f"no checkpoint could be written ({error.strerror}); the one before stands"
            )
        else:
            for name in set(self._files) - set(files):
                self._scratch.remove(name)
            self._serial, self._files = serial, tuple(files)
            self.workspace.ports.log(
                "debug", f"checkpoint {serial} after batch {cursor.batches} of pass {cursor.number + 1}"
            )
        self.workspace.machine.curve.sample("checkpoint", "after", self.workspace.machine.device)
        self._saved_at = self.clock()
        self._took = self._saved_at - begun

    def _write_tensors(self, serial: int, running: Sequence[LayerStatistics]) -> dict[str, list[list[str]]]:
        files: dict[str, list[list[str]]] = {}
        for place, group in enumerate(_grouped(self._tensors(running))):
            name = f"checkpoint/{serial}.{place}.safetensors"
            self._scratch.save_tensors(name, {str(key): entry[3] for key, entry in enumerate(group)}, {})
            files[name] = [[kind, owner, entry, digest(tensor)] for kind, owner, entry, tensor in group]
        return files

    def _tensors(self, running: Sequence[LayerStatistics]) -> Iterator[tuple[str, str, str, Tensor]]:
        """(kind, name, field, tensor) of everything that is saved."""
        if running:
            # between two passes there is none: each begins with its own
            yield "generator", "cpu", "", torch.get_rng_state()
            if self.workspace.machine.device.type == "cuda":
                yield "generator", "cuda", "", torch.cuda.get_rng_state(self.workspace.machine.device)
        for name, buffer in self.model.named_buffers():
            if buffer.layout == torch.strided and bit_sum(buffer) != self._buffers.get(name):
                yield "buffer", name, "", buffer.detach()
        for each in running:
            for entry, value in state_of(each).items():
                if isinstance(value, Tensor):
                    yield "sums", each.layer.name, entry, value

    def _stands(self, spilled: SpilledFactors) -> bool:
        return spilled.intact(self._scratch)


def _snapshot(stored: Mapping[str, Any]) -> Snapshot:
    spilled = {name: SpilledFactors(**each) for name, each in stored["spilled"].items()}
    rows = {name: (int(a), int(g)) for name, (a, g) in stored["rows"].items()}
    sums = {name: None if each is None else _layer_sums(each) for name, each in (stored.get("sums") or {}).items()}
    return Snapshot(eighths=stored["eighths"], examples=stored["examples"], spilled=spilled, rows=rows, sums=sums)


def _layer_sums(stored: Mapping[str, Any]) -> LayerSums:
    tied = stored["tied"]
    return LayerSums(**{**stored, "tied": None if tied is None else TiedSums(**tied)})


def _grouped(entries: Iterable[tuple[str, str, str, Tensor]]) -> Iterator[list[tuple[str, str, str, Tensor]]]:
    """Runs of entries that share a file."""
    group: list[tuple[str, str, str, Tensor]] = []
    size = 0
    for entry in entries:
        own = entry[3].numel() * entry[3].element_size()
        if group and size + own > _FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(entry)
        size += own
    if group:
        yield group


def fingerprint(model: nn.Module) -> str:
    """Compute a digest of a model's numbers.

    Args:
        model: The model.

    Returns:
        SHA-256, in hexadecimal, over name, type, shape and checksum of every parameter and buffer.
    """
    entries = [
        [name, str(tensor.dtype), list(tensor.shape), bit_sum(present(tensor))]
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    return _sha256(entries)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sha256(value: object) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()
