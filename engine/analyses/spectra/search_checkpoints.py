"""Checkpoints of a search or a training: its state so far, so that a killed job goes on where it was.

At an interval, between two passes over the data or two steps, the state is written into the job's scratch place, the
tensors first, under new names, and the manifest last: it replaces the one before in one step, with a digest of its own
and one of each tensor. A later attempt with the same factors, options and numerics continues with the same bits; one
that does not belong, or does not read as written, is discarded with a line in the log.
"""

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.artifacts import Artifacts, load_sealed, save_sealed
from engine.factors.kronecker_factors import digest
from engine.workspace import Workspace

MANIFEST = "search/search.json"
"""The file that makes the others a checkpoint of a search."""
MANIFESTS = (MANIFEST, "training/training.json")
"""The same of every work: a later attempt adopts the files beside one of these, and no others."""
_SHARE = 20
"""No checkpoint sooner than this many times what the last one took: they cost at most 5 % of the time."""
_FILE = re.compile(r"[a-z]+/\d+\.\d+\.safetensors")
"""Names of the files of tensors."""


@dataclass(frozen=True, kw_only=True)
class SavedSearch:
    """A checkpoint that belongs here, without its tensors."""

    finished: Mapping[str, Any]
    """Results of the curvatures that are done, as JSON holds them, by name."""
    of: str | None
    """The curvature under way; None between two."""
    chosen: Mapping[str, int]
    """The choice that memory allowed when the search began."""
    counts: Mapping[str, int]
    """Products and passes of the curvature under way."""
    learnt: Mapping[str, Any] | None = None
    """Facts that its products have learnt, as plain values; None between two."""


@dataclass(kw_only=True)
class SearchCheckpoints:
    """Writes the checkpoints of one job's searches, and reads the one that an earlier attempt left."""

    workspace: Workspace
    conditions: Mapping[str, Any]
    """Values that must be equal for a checkpoint to belong: each entry's name says what differs."""
    work: str = "search"
    """The noun of the work, which names its files too."""
    clock: Callable[[], float] = time.monotonic
    _serial: int = 0
    _files: dict[str, dict[str, str]] = field(default_factory=dict)
    """Digests of the valid checkpoint's tensors, by file and name."""
    _saved_at: float = 0.0
    _took: float = 0.0

    def __post_init__(self) -> None:
        """Begin the first interval."""
        if self._manifest not in MANIFESTS:
            raise ValueError(f"no later attempt would adopt `{self._manifest}`; add it to MANIFESTS")
        self._saved_at = self.clock()

    @property
    def _manifest(self) -> str:
        return f"{self.work}/{self.work}.json"

    @property
    def _format(self) -> str:
        return f"kronoscope-{self.work}/2"

    @property
    def _scratch(self) -> Artifacts:
        if self.workspace.ports.scratch is None:
            raise ValueError("checkpoints need a scratch place")
        return self.workspace.ports.scratch

    def find(self) -> SavedSearch | None:
        """Return the checkpoint of an earlier attempt.

        Returns:
            What it says besides its tensors; None without one that belongs and is whole.
        """
        if not self.workspace.saves_checkpoints:
            return None
        try:
            body = load_sealed(self._scratch, self._manifest)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the file, it is of no use
            self.discard(f"it cannot be read ({type(error).__name__})")
            return None
        if body.get("format") != self._format:
            self.discard("it is of another format")
            return None
        here, there = self.conditions, body["conditions"]
        differing = sorted(
            name for name in here.keys() | there.keys() if _canonical(here.get(name)) != _canonical(there.get(name))
        )
        if differing:
            self.discard(f"it was made under another {', another '.join(differing)}")
            return None
        self._serial, self._files = body["serial"], body["files"]
        return SavedSearch(
            finished=body["finished"],
            of=body["of"],
            chosen=body["chosen"],
            counts=body["counts"],
            learnt=body["learnt"],
        )

    def tensors(self) -> dict[str, Tensor] | None:
        """Read the tensors of the checkpoint that ``find`` returned.

        Returns:
            Host tensors by the names they were saved under; None, with a line in the log, where one is damaged.

        Memory:
            The state of one search.
        """
        found: dict[str, Tensor] = {}
        for file, written in self._files.items():
            try:
                stored = self._scratch.load_tensors(file)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with the file, it is of no use
                self.discard(f"{file} cannot be read ({type(error).__name__})")
                return None
            if {name: digest(tensor) for name, tensor in stored.items()} != written:
                self.discard(f"{file} is damaged")
                return None
            found |= stored
        return found

    def discard(self, why: str) -> None:
        """Log that an earlier checkpoint is not used, and delete its files.

        Args:
            why: The reason, as the end of a sentence.
        """
        self.workspace.ports.log("warning", f"the checkpoint of an earlier attempt's {self.work} is discarded: {why}")
        try:
            names = [name for name in self._scratch.load_json(self._manifest)["body"]["files"] if _FILE.fullmatch(name)]
        except Exception:  # noqa: BLE001 - whatever is wrong with it, nothing of it is read again
            names = list(self._files)
        for name in (self._manifest, *names):
            self._scratch.remove(name)
        self._serial, self._files = 0, {}

    def due(self) -> bool:
        """Whether it is time to save."""
        pause = max(self.workspace.resume.checkpoint_seconds, _SHARE * self._took)
        return self.workspace.saves_checkpoints and self.clock() - self._saved_at >= pause

    def worth(self) -> bool:
        """Whether a checkpoint now costs little against the time since the last, whatever the interval."""
        return self.workspace.saves_checkpoints and self.clock() - self._saved_at >= _SHARE * self._took

    def save(self, saved: SavedSearch, tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint, its manifest last; where the disk refuses, the one before stays valid.

        Args:
            saved: Everything but the tensors.
            tensors: State of the search under way, on any device; none between two curvatures.

        Memory:
            One tensor on the host, where the state is on a device.
        """
        begun = self.clock()
        serial = self._serial + 1
        try:
            files: dict[str, dict[str, str]] = {}
            for place, (name, tensor) in zip(itertools.count(), tensors.items(), strict=False):
                file = f"{self.work}/{serial}.{place}.safetensors"
                host = tensor.detach().to("cpu").contiguous()
                self._scratch.save_tensors(file, {name: host}, {})
                files[file] = {name: digest(host)}
            body = {
                "format": self._format,
                "serial": serial,
                "conditions": self.conditions,
                "finished": saved.finished,
                "of": saved.of,
                "chosen": saved.chosen,
                "counts": saved.counts,
                "learnt": saved.learnt,
                "files": files,
            }
            save_sealed(self._scratch, self._manifest, body)
        except OSError as error:
            self.workspace.ports.log(
                "warning",
                f"no checkpoint of the {self.work} could be written ({error.strerror}); the one before stands",
            )
        else:
            for name in self._files.keys() - files.keys():
                self._scratch.remove(name)
            self._serial, self._files = serial, files
            self.workspace.ports.log("debug", f"checkpoint {serial} of the {self.work}")
        self._saved_at = self.clock()
        self._took = self._saved_at - begun


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
