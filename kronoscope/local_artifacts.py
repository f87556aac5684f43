"""Artifacts on disk that a notebook reads: folders of stored factors, and a gradient of its own."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor
from typing_extensions import override

from engine.artifacts import ReadOnly
from engine.errors import BrokenFactors
from kronoscope.local_inputs import OptionRefused, WrongOptionType


class Folder(ReadOnly):
    """Stored factors as the engine reads them: names below ``factors/`` are files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def load_tensors(self, name: str) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self._folder / name.removeprefix("factors/"))

    @override
    def load_json(self, name: str) -> Any:
        return json.loads(unchanged(self._folder / name.removeprefix("factors/")).read_bytes())


def unchanged(file: Path) -> Path:
    """Return a file, if it is the one that the `job.json` of a run lists above it; ``BrokenFactors`` if another is."""
    for root in file.resolve().parents:
        try:
            job = json.loads((root.parent / "job.json").read_bytes()) if root.name == "artifacts" else {}
            listed = {each["name"]: each["sha256"] for each in job.get("artifacts", ()) if job["state"] != "running"}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        recorded = listed.get(file.resolve().relative_to(root).as_posix())
        with file.open("rb") as content:
            if recorded is not None and hashlib.file_digest(content, "sha256").hexdigest() != recorded:
                raise BrokenFactors(f"{file} is not what the run wrote, by its SHA-256; run the document again")
    return file


def open_against(params: Mapping[str, Any]) -> Folder | None:
    """Open the second set of factors that an analysis in a notebook names; None where nothing names any.

    ``BrokenFactors`` if there is no index where the path leads, ``OptionRefused`` if a job of a service is named.
    """
    reference = next((each.against for each in params.values() if getattr(each, "against", None) is not None), None)
    if reference is None:
        return None
    if reference.path is None:
        raise OptionRefused("`against.job` names a job of a service; in a notebook give `against: {'path': FOLDER}`")
    return folder_of(Path(reference.path))


def open_gradient(params: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Read the gradient by parameter that an analysis names in place of that of the data; None where none does.

    ``OptionRefused`` if there is no such file, or it is not one of safetensors.
    """
    given = {kind: each.gradient for kind, each in params.items() if getattr(each, "gradient", None) is not None}
    if not given:
        return None
    ((kind, gradient),) = given.items()
    try:
        return safetensors.torch.load_file(gradient.path)
    except (OSError, safetensors.SafetensorError) as error:
        raise OptionRefused(
            f"`params['{kind}'].gradient.path` is {gradient.path[:80]!r}, which cannot be read "
            f"({error}); give a `.safetensors` file with a tensor for each trainable parameter"
        ) from error


def path_of(given: object) -> Path:
    """Return the path that a caller gives."""
    if not isinstance(given, (str, Path)):
        raise WrongOptionType(f"`path` is {type(given).__name__}; give the path of a folder")
    return Path(given)


def folder_of(folder: Path) -> Folder:
    """Return the stored factors of a folder, a run's output or its `artifacts`."""
    for candidate in (folder, folder / "factors", folder / "artifacts" / "factors"):
        if (candidate / "factors.index.json").is_file():
            return Folder(candidate)
        if (candidate / "stabilised.index.json").is_file():
            raise BrokenFactors(f"{candidate} holds eigenbases, alone or among matrices; read it by `load_stabilised`")
    raise BrokenFactors(
        f"{folder} holds no factors.index.json; give the folder that a job with `keep: [factors]` wrote"
    )
