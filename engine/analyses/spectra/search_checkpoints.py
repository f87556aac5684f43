"""Checkpoints of a search or a training: its state so far, so that a killed job goes on where it was.

They are written between two passes over the data or two steps. A later attempt with the same factors, options and
numerics continues with the same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from typing_extensions import override

from engine.collection.checkpoints import CheckpointFiles, CheckpointForeign

MANIFEST = "search/search.json"
"""The file that makes the others a checkpoint of a search."""
MANIFESTS = (MANIFEST, "training/training.json")
"""The same of every work: a later attempt adopts the files beside one of these, and no others."""


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
    """Products and passes of the curvature under way, and the batches of all so far."""
    learnt: Mapping[str, Any] | None = None
    """Facts that its products have learnt, as plain values; None between two."""


@dataclass(kw_only=True)
class SearchCheckpoints(CheckpointFiles):
    """Writes the checkpoints of one job's searches, and reads the one that an earlier attempt left."""

    work: str = "search"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self._manifest not in MANIFESTS:
            raise ValueError(f"no later attempt would adopt `{self._manifest}`; add it to MANIFESTS")

    def find(self) -> SavedSearch | None:
        """Return what an earlier attempt's checkpoint says, but for tensors; None if none belongs and is whole."""
        if not self.workspace.saves_checkpoints:
            return None
        try:
            body = self._opened()
        except CheckpointForeign as foreign:
            self.discard(str(foreign))
            return None
        if body is None:
            return None
        self._serial, self._files = body["serial"], body["files"]
        return SavedSearch(**{entry.name: body[entry.name] for entry in fields(SavedSearch)})

    def tensors(self) -> dict[str, Tensor] | None:
        """Read the host tensors of the checkpoint that ``find`` returned, by the names they were saved under.

        They are the state of one search; None, with a line in the log, where one is damaged.
        """
        try:
            return {name: tensor for (name,), tensor in self._read_tensors(self._files)}
        except CheckpointForeign as foreign:
            self.discard(str(foreign))
            return None

    def save(self, saved: SavedSearch, tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint, its manifest last; where the disk refuses, the one before stays valid.

        The tensors are the state of the search under way, on any device, one of them on the host at a time; none
        between two curvatures.
        """
        entries = (((name,), tensor.detach()) for name, tensor in tensors.items())
        self._write(entries, vars(saved), f" of the {self.work}")
