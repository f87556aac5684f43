"""Generators of random numbers that a model may draw from without one of its own: seeded, read, and put back."""

import contextlib
import functools
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B1
"""An odd number: its multiples by numbers below 2³² differ in the lowest 32 bits."""


def fold_seed(seed: int) -> int:
    """Return a seed for torch, whose generator of the host reads the lowest 32 bits alone.

    Args:
        seed: The seed, at least -2**63 and below 2**64.

    Returns:
        Below 2**32 the seed itself; else one of another low half for each high half, which stays as it is.
    """
    return seed if seed < 2**32 else seed ^ ((seed >> 32) * _GOLDEN % 2**32)


def seed_generators(seed: int) -> None:
    """Seed the generators that a model draws from without one of its own: torch's, Python's, and numpy's if loaded.

    Torch's are those that ``torch.manual_seed`` seeds, by ``fold_seed``. For each kind of device that has not been
    started, torch writes down the call and the stack that it came from: some milliseconds each, as much as a pass over
    a small batch. Where there is no such device nothing is written down.

    Args:
        seed: The seed, at least -2**63 and below 2**64.
    """
    if _has_accelerator():
        torch.manual_seed(fold_seed(seed))
    else:
        torch.default_generator.manual_seed(fold_seed(seed))
    random.seed(seed)
    if (numpy := _numpy()) is not None:
        numpy.random.seed([seed >> shift & 0xFFFFFFFF for shift in (0, 32)])


@dataclass(frozen=True, eq=False)
class Generators:
    """States of these generators, to which a forward pass can be brought back."""

    states: Mapping[str, Any]
    """Those of `cpu`, `cuda`, `python` and `numpy`, as each library returns them; those alone that there are."""

    @classmethod
    def here(cls, device: torch.device) -> "Generators":
        """Read the states as they are.

        Args:
            device: Device that the model runs on.
        """
        states: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
        if device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(device)
        if (numpy := _numpy()) is not None:
            states["numpy"] = numpy.random.get_state()
        return cls(states)

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor]) -> "Generators":
        """Read the states that ``tensors`` returned.

        Args:
            tensors: Bytes of each state, or of some.
        """
        states: dict[str, Any] = dict(tensors)
        if "python" in states:
            version, numbers, *others = json.loads(bytes(states["python"].tolist()))
            states["python"] = version, tuple(numbers), *others
        if "numpy" in states:
            states["numpy"] = tuple(json.loads(bytes(states["numpy"].tolist())))
        return cls(states)

    def tensors(self) -> dict[str, Tensor]:
        """Return the bytes of each state: those of `cpu` and `cuda` as torch has them, the others as JSON."""
        tensors = dict(self.states)
        if "python" in tensors:
            tensors["python"] = _written(tensors["python"])
        if "numpy" in tensors:
            name, keys, *others = tensors["numpy"]
            tensors["numpy"] = _written([name, keys.tolist(), *others])
        return tensors


def set_generators(start: Generators | int, device: torch.device) -> None:
    """Bring these generators to where a forward pass began.

    Args:
        start: Their states, or a seed.
        device: Device that the model runs on.
    """
    if isinstance(start, int):
        seed_generators(start)
        return
    for name, state in start.states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == "cuda":
            torch.cuda.set_rng_state(state, device)
        elif name == "python":
            random.setstate(state)
        elif (numpy := _numpy()) is not None:
            numpy.random.set_state(state)


@contextlib.contextmanager
def kept_generators(*devices: torch.device) -> Iterator[None]:
    """Put these generators back afterwards as they stood.

    Args:
        devices: Devices whose generators are put back beside those of the host, which always are.
    """
    start = Generators.here(torch.device("cpu"))
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            set_generators(start, torch.device("cpu"))


def _written(state: object) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def _numpy() -> Any:  # noqa: ANN401 - the engine does without numpy
    return sys.modules.get("numpy")


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
