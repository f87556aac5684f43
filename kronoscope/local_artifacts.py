"""Artifacts of an analysis in this process: a folder of stored factors that is read, or what is kept in memory."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor


class Folder:
    """Stored factors as the engine reads them: names below ``factors/`` are files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors under ``name``."""
        return safetensors.torch.load_file(self._folder / name.removeprefix("factors/"))

    def load_json(self, name: str) -> Any:  # noqa: ANN401 - whatever was written
        """Return the table under ``name``."""
        return json.loads((self._folder / name.removeprefix("factors/")).read_bytes())

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Refuse: nothing is written here."""
        del tensors, metadata
        raise PermissionError(f"{name}: factors of an earlier job are read, never written")

    def save_json(self, name: str, value: object) -> None:
        """Refuse: nothing is written here."""
        del value
        raise PermissionError(f"{name}: factors of an earlier job are read, never written")

    def remove(self, name: str) -> None:
        """Refuse: nothing is removed here."""
        raise PermissionError(f"{name}: factors of an earlier job are read, never removed")


class Held:
    """Artifacts of an analysis in this process: kept in memory."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Keep copies of ``tensors`` on the host."""
        del metadata
        self._kept[name] = {key: tensor.detach().to("cpu").clone() for key, tensor in tensors.items()}

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors under ``name``."""
        return dict(self._find(name))

    def save_json(self, name: str, value: object) -> None:
        """Keep a copy of ``value``."""
        self._kept[name] = copy.deepcopy(value)

    def load_json(self, name: str) -> Any:  # noqa: ANN401 - whatever was written
        """Return the table under ``name``."""
        return copy.deepcopy(self._find(name))

    def remove(self, name: str) -> None:
        """Let go of ``name``."""
        self._kept.pop(name, None)

    def _find(self, name: str) -> Any:  # noqa: ANN401 - whatever was written
        if name not in self._kept:
            raise FileNotFoundError(name)
        return self._kept[name]
