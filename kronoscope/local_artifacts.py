"""Artifacts of an analysis in this process: a folder of stored factors that is read, or what is kept in memory."""

import contextlib
import copy
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor


class Folder:
    """Stored factors as the engine reads them: names below ``factors/`` are files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one file.

        Args:
            name: The file's name, as in a job's `artifacts`.

        Returns:
            Tensors on the host by name, with the shapes and dtypes that were stored.
        """
        return safetensors.torch.load_file(self._folder / name.removeprefix("factors/"))

    def load_json(self, name: str) -> Any:  # noqa: ANN401 - whatever was written
        """Return the table of one file.

        Args:
            name: The file's name, as in a job's `artifacts`.

        Returns:
            The value, as decoded from JSON.
        """
        return json.loads((self._folder / name.removeprefix("factors/")).read_bytes())

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Refuse, since nothing is written here.

        Args:
            name: The file's name, as in a job's `artifacts`.
            tensors: Tensors of any shape; not used.
            metadata: Text for the header; not used.

        Raises:
            PermissionError: In any case.
        """
        del tensors, metadata
        raise PermissionError(f"{name}: factors of an earlier job are read, never written")

    def save_json(self, name: str, value: object) -> None:
        """Refuse, since nothing is written here.

        Args:
            name: The file's name, as in a job's `artifacts`.
            value: The table; not used.

        Raises:
            PermissionError: In any case.
        """
        del value
        raise PermissionError(f"{name}: factors of an earlier job are read, never written")

    def remove(self, name: str) -> None:
        """Refuse, since nothing is removed here.

        Args:
            name: The file's name, as in a job's `artifacts`.

        Raises:
            PermissionError: In any case.
        """
        raise PermissionError(f"{name}: factors of an earlier job are read, never removed")


_ATOMS = frozenset({str, int, float, bool, type(None)})


class Held:
    """Artifacts of an analysis in this process: kept in memory."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Keep tensors on the host, as they are where they stand there and are no part of larger ones.

        Args:
            name: The file's name, as in a job's `artifacts`.
            tensors: Tensors by name, of any shape, dtype and device; nothing writes to them afterwards.
            metadata: Text for the header; not kept.
        """
        del metadata
        self._kept[name] = {key: _alone(tensor.detach().to("cpu")) for key, tensor in tensors.items()}

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors under a name.

        Args:
            name: The file's name, as in a job's `artifacts`.

        Returns:
            Those on the host by name, with the shapes and dtypes of the originals.

        Raises:
            FileNotFoundError: If nothing was kept under the name.
        """
        return dict(self._find(name))

    def save_json(self, name: str, value: object) -> None:
        """Keep a copy of a table.

        Args:
            name: The file's name, as in a job's `artifacts`.
            value: A record, or anything that JSON holds.
        """
        self._kept[name] = _copied(value)

    def load_json(self, name: str) -> Any:  # noqa: ANN401 - whatever was written
        """Return the table under a name.

        Args:
            name: The file's name, as in a job's `artifacts`.

        Returns:
            A copy of the value that was kept.

        Raises:
            FileNotFoundError: If nothing was kept under the name.
        """
        return _copied(self._find(name))

    @contextlib.contextmanager
    def writing(self, name: str, media_type: str) -> Iterator[io.BytesIO]:
        """Keep a file of another kind as its bytes.

        Args:
            name: The file's name, as in a job's `artifacts`.
            media_type: Its type; not kept.
        """
        del media_type
        file = io.BytesIO()
        yield file
        self._kept[name] = file.getvalue()

    def remove(self, name: str) -> None:
        """Remove a file; one that does not exist is not an error.

        Args:
            name: The file's name, as in a job's `artifacts`.
        """
        self._kept.pop(name, None)

    def _find(self, name: str) -> Any:  # noqa: ANN401 - whatever was written
        if name not in self._kept:
            raise FileNotFoundError(name)
        return self._kept[name]


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor that keeps no other numbers in memory than its own."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _copied(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    """A copy of a table, in a fifth of the time that one of any object takes."""
    if type(value) is dict:
        return {key: _copied(own) for key, own in value.items()}
    if type(value) is list:
        return [_copied(own) for own in value]
    return value if type(value) in _ATOMS else copy.deepcopy(value)
