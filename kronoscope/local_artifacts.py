"""Artifacts on disk that a notebook reads: a folder of stored factors."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor
from typing_extensions import override

from engine.artifacts import ReadOnly


class Folder(ReadOnly):
    """Stored factors as the engine reads them: names below ``factors/`` are files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def load_tensors(self, name: str) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self._folder / name.removeprefix("factors/"))

    @override
    def load_json(self, name: str) -> Any:
        return json.loads((self._folder / name.removeprefix("factors/")).read_bytes())
