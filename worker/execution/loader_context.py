"""The context of a loader: the model store, the folders and factories that are allowed, and how to report."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from catalog.frames import AppliedAdapter
from worker.execution.data.byte_count import ByteCount
from worker.execution.files.open_files import OpenFile, OpenFolder, open_allowed, outside, real_path
from worker.execution.refusal import Refusal, storable_text


def _ignore(*_: object) -> None:
    """Discard the report."""


@dataclass(frozen=True, kw_only=True)
class LoaderContext:
    """The parts of this machine that one job's loaders may use."""

    store: Path
    """Folder of the models that were fetched or trained once."""
    offline: bool = True
    paths: tuple[Path, ...] = ()
    """Folders in which factories are looked for, after everything installed."""
    factories: tuple[str, ...] = ("*",)
    directories: tuple[str, ...] = ("*",)
    model_path: Path | None = None
    """Folder of the upload that is the model; None where none is, or nothing laid it out."""
    data_path: Path | None = None
    """Folder of the upload that is the data."""
    query_path: Path | None = None
    """Folder of the upload that is the query."""
    most_bytes: int = 2**62
    """Bytes of host memory that models and data may take while they are loaded."""
    shapes_only: bool = False
    """For a plan: models stand on the meta device, and no weight is read or fetched."""
    report: Callable[[str, int, int | None, str], None] = _ignore
    checkpoint: Callable[[], None] = _ignore
    log: Callable[[str, str], None] = _ignore
    note: Callable[[str], None] = _ignore
    """Receives what was read otherwise than it stands there, in a way that changes numbers."""
    unused: Callable[[str], None] = _ignore
    """Receives what lies in the model's folder or the data, and was not used."""
    describe: Callable[[str, Any], None] = _ignore
    """Receives how the data were read, by name: columns, the numbers of labels, the scale of images."""

    adapted: Callable[[AppliedAdapter], None] = _ignore
    """Receives the adapter that was applied to the model."""

    def quiet(self) -> "LoaderContext":
        """Return a context for what is read once more, or is not the job's data: nobody hears of it."""
        return replace(self, log=_ignore, note=_ignore, unused=_ignore, describe=_ignore, adapted=_ignore)

    def notice(self, message: str) -> None:
        """Say in log and record that numbers are of something else than what stands in a folder or file."""
        self.log("warning", message)
        self.note(message)

    def byte_count(self, pointer: str) -> ByteCount:
        """Return a count of what a loader holds, which begins at 0."""
        return ByteCount(most_bytes=self.most_bytes, pointer=pointer, checkpoint=self.checkpoint)

    def upload(self, block: str) -> OpenFolder:
        """Return the folder of the upload that a block of the document names."""
        path: Path | None = getattr(self, f"{block}_path")
        if path is None:
            raise Refusal(
                "is an upload of a service; in the foreground name its folder or file on this machine",
                pointer=f"/{block}/id",
                code="unsupported_source",
            )
        return OpenFolder.by_itself(path, f"/{block}/id")

    def open_path(self, path: str, pointer: str) -> OpenFile | OpenFolder:
        """Open a file or folder that the job may read, with links followed as far as they stay in an allowed folder."""
        found = open_allowed(Path(path), self._root(path, pointer), path, pointer)
        if found is None:
            raise Refusal(
                f"{storable_text(path)} does not exist on this machine; name a file or folder that does",
                pointer=pointer,
                code="not_found",
            )
        return found

    def _root(self, path: str, pointer: str) -> Path | None:
        """The allowed folder that a path lies in; None if all are allowed."""
        if "*" in self.directories:
            return None
        real = real_path(Path(path))
        roots = [Path(os.path.realpath(root)) for root in self.directories]
        within = [root for root in roots if real is not None and real.is_relative_to(root)]
        if not within:
            raise outside(None, pointer)
        # of nested ones the widest: links within it are as good
        return min(within, key=lambda root: len(root.parts))
