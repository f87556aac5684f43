"""Checkpoint files: tensors and a manifest in the job's scratch place, by which a killed attempt's work goes on.

The tensors come first, under new names, and the manifest last: it replaces the one before in one step, has a digest of
its own and one of each tensor, so there is always one whole checkpoint, and a torn one is not a checkpoint. One that
does not belong, or does not read as written, is discarded with a line in the log, never trusted.
"""

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.artifacts import Artifacts, load_sealed, save_sealed
from engine.errors import Unwinding
from engine.factors.kronecker_factors import digest
from engine.workspace import Workspace

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
            name for name in here.keys() | there.keys() if canonical(here.get(name)) != canonical(there.get(name))
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

        Args:
            why: The reason, as the end of a sentence.
            keep: Names of files that stay.
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


def canonical(value: object) -> str:
    """Return the one text of what JSON holds."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
