"""Stored decompositions: the eigenvalues of a factor, and its eigenvectors, as files with their digests.

NAME.values.safetensors     eigenvalues, also as the solver gave them
NAME.vectors.safetensors    eigenvectors, one a row, where there are any
NAME.json                   how they were made, and their digests; the last, so that its presence says that all is there
NAME.device.json            the device has been asked for them; it stays where an attempt ended meanwhile
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.artifacts import Artifacts, load_sealed, save_sealed
from engine.factors.kronecker_factors import digest
from engine.linalg.eigendecomposition import Decomposition
from engine.memory.out_of_memory import lost_device

OF_PIECES = "factors/decompositions"
"""Folder in which a piece of a divided job stores them."""
DEVICE_ASKED = ".device.json"
"""End of the name of a marker, which is for the job's next attempt alone."""


class DamagedDecomposition(ValueError):
    """A stored decomposition differs from the one that was written."""


def write_decomposition(artifacts: Artifacts, name: str, found: Decomposition, conditions: Mapping[str, Any]) -> None:
    """Write a decomposition."""
    vectors = found.vectors
    if vectors is not None:
        # LAPACK's columns are rows of the transpose, which are written without a copy
        artifacts.save_tensors(f"{name}.vectors.safetensors", {"rows": vectors.mT}, {})
    numbers = {"values": found.values} | ({} if found.signed is None else {"signed": found.signed})
    artifacts.save_tensors(f"{name}.values.safetensors", numbers, {})
    save_sealed(
        artifacts,
        f"{name}.json",
        {
            "conditions": dict(conditions),
            "vectors": vectors is not None,
            "rungs": list(found.rungs),
            "residual": found.residual,
            "precision": found.precision,
            "digests": {
                "vectors": None if vectors is None else digest(vectors.mT),
                **{which: digest(tensor) for which, tensor in numbers.items()},
            },
        },
    )


def read_decomposition(
    artifacts: Artifacts, name: str, conditions: Mapping[str, Any], *, vectors: bool
) -> Decomposition | None:
    """Read a decomposition."""
    try:
        table = load_sealed(artifacts, f"{name}.json")
        # another version of the program may have computed otherwise
        if table["conditions"] != dict(conditions):
            return None
        basis = None
        if table["vectors"]:
            wanted = f"{name}.vectors.safetensors"
            basis = _intact(artifacts, wanted, "rows", table["digests"]["vectors"]).mT if vectors else torch.empty(0, 0)
        numbers = {
            which: _intact(artifacts, f"{name}.values.safetensors", which, table["digests"][which])
            for which in ("values", "signed")
            if which == "values" or which in table["digests"]
        }
    except (FileNotFoundError, KeyError, TypeError):
        return None  # it was never written, or by a version that kept no digests
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the port's own errors, and whatever a damaged file makes a reader say
        raise DamagedDecomposition(f"the stored decomposition {name} is damaged") from error
    return Decomposition(
        values=numbers["values"],
        signed=numbers.get("signed"),
        vectors=basis,
        rungs=tuple(table["rungs"]),
        residual=table["residual"],
        precision=table["precision"],
    )


def _intact(artifacts: Artifacts, file: str, name: str, wanted: str) -> Tensor:
    stored = artifacts.load_tensors(file)[name]
    if digest(stored) != wanted:
        raise ValueError(f"{file} is damaged")
    return stored


@contextlib.contextmanager
def mark_device(scratch: Artifacts, name: str, rung: str) -> Iterator[None]:
    """Keep a marker while the device decomposes: it stays where the process dies, and where the device is lost."""
    save_sealed(scratch, f"{name}{DEVICE_ASKED}", {"rung": rung})
    try:
        yield
    except BaseException as error:
        if not lost_device(error):
            scratch.remove(f"{name}{DEVICE_ASKED}")
        raise
    scratch.remove(f"{name}{DEVICE_ASKED}")


def marked_rung(scratch: Artifacts, name: str) -> str | None:
    """Return the solver of the device that an earlier attempt ended in; None where none did."""
    try:
        return str(load_sealed(scratch, f"{name}{DEVICE_ASKED}")["rung"])
    except FileNotFoundError:
        return None
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 - a marker is one whatever has become of its text
        return "the device"
