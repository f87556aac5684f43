"""The context of a loader: the model store, the folders and factories that are allowed, and how to report."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from worker.execution.refusal import Refusal


def _ignore(*_: object) -> None:
    """Report to nobody."""


@dataclass(frozen=True, kw_only=True)
class LoaderContext:
    """The parts of this machine that one job's loaders may use."""

    store: Path
    """Where models fetched or trained once are kept."""
    offline: bool = True
    paths: tuple[Path, ...] = ()
    """Where factories are looked for, after everything installed."""
    factories: tuple[str, ...] = ("*",)
    directories: tuple[str, ...] = ("*",)
    shapes_only: bool = False
    """For a plan: models stand on the meta device, and no weight is read or fetched."""
    report: Callable[[str, int, int | None, str], None] = _ignore
    checkpoint: Callable[[], None] = _ignore
    log: Callable[[str, str], None] = _ignore

    def allowed_path(self, path: str, pointer: str) -> Path:
        """Return an existing path that the job may read, with symbolic links followed first.

        Args:
            path: The path as the document names it.
            pointer: The field of the document.

        Returns:
            The real path of a file or folder.

        Raises:
            Refusal: If it lies outside what the operator lists, or is not there.
        """
        real = Path(os.path.realpath(Path(path).expanduser()))
        if "*" not in self.directories:
            roots = [Path(os.path.realpath(root)) for root in self.directories]
            if not any(real.is_relative_to(root) for root in roots):
                # the same sentence whether it exists or not: a caller learns nothing about the machine
                raise Refusal(
                    "lies outside the folders that this service's operator lists",
                    pointer=pointer,
                    code="not_allowed",
                )
        if not real.exists():
            raise Refusal(
                f"{path} does not exist on this machine; name a file or folder that does",
                pointer=pointer,
                code="not_found",
            )
        if not (real.is_file() or real.is_dir()):
            raise Refusal(f"{path} is neither a file nor a folder", pointer=pointer, code="not_found")
        return real
