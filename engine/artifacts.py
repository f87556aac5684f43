"""Artifacts: the port for tensors and tables by name, with what is kept in memory and what is only read."""

import contextlib
import copy
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

_ATOMS = frozenset({str, int, float, bool, type(None)})


class Artifacts(Protocol):
    """A place for tensors and tables. Names are relative, with forward slashes."""

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write tensors, atomically.

        Args:
            tensors: Host tensors of any shape, by name; nothing writes to them afterwards.
            metadata: Strings that are written beside them.
        """

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Read tensors back.

        Returns:
            Host tensors by name, of the shapes and dtypes that were written.

        Raises:
            FileNotFoundError: If nothing has that name.
        """

    def save_json(self, name: str, value: object) -> None:
        """Write a table of anything that JSON can hold, atomically."""

    def load_json(self, name: str) -> Any:  # noqa: ANN401 - whatever was written
        """Read a table back.

        Returns:
            The table; where it was a file, its tuples are lists.

        Raises:
            FileNotFoundError: If nothing has that name.
        """

    def remove(self, name: str) -> None:
        """Delete a file; nothing happens where nothing has its name."""


class ReadOnly(Artifacts):
    """Artifacts that refuse to be written."""

    _source = "factors of an earlier job are"

    @override
    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        raise PermissionError(f"{name}: {self._source} read, never written")

    @override
    def save_json(self, name: str, value: object) -> None:
        raise PermissionError(f"{name}: {self._source} read, never written")

    @override
    def remove(self, name: str) -> None:
        raise PermissionError(f"{name}: {self._source} read, never removed")


class Held(Artifacts):
    """Artifacts in memory: tensors as they are where they stand on the host and are no part of larger ones."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    @override
    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self._kept[name] = {key: _alone(tensor.detach().to("cpu")) for key, tensor in tensors.items()}

    @override
    def load_tensors(self, name: str) -> dict[str, Tensor]:
        return dict(self._find(name))

    @override
    def save_json(self, name: str, value: object) -> None:
        self._kept[name] = _copied(value)

    @override
    def load_json(self, name: str) -> Any:
        return _copied(self._find(name))

    @contextlib.contextmanager
    def writing(self, name: str, media_type: str) -> Iterator[io.BytesIO]:
        """Keep a file of another kind as its bytes; its type is not kept."""
        del media_type
        file = io.BytesIO()
        yield file
        self._kept[name] = file.getvalue()

    @override
    def remove(self, name: str) -> None:
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


def save_sealed(artifacts: Artifacts, name: str, body: Mapping[str, Any]) -> None:
    """Write a table with its digest.

    Args:
        body: The table, of what JSON holds.

    Raises:
        ValueError: If a number is NaN or infinite.
    """
    artifacts.save_json(name, {"body": body, "sha256": _sha256(body)})


def load_sealed(artifacts: Artifacts, name: str) -> Mapping[str, Any]:
    """Read a table that ``save_sealed`` wrote.

    Raises:
        FileNotFoundError: If nothing has that name.
        ValueError: If it is another table by now, or none.
    """
    stored = artifacts.load_json(name)
    if not isinstance(stored, Mapping) or _sha256(stored.get("body")) != stored.get("sha256"):
        raise ValueError(f"{name} is damaged")
    body: Mapping[str, Any] = stored["body"]
    return body


def _sha256(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
