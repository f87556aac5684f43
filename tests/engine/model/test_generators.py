"""Generators that a model draws from: each seed has numbers of its own, on the host too, which reads 32 bits of it."""

import random

import numpy as np
import pytest
import torch

from engine.model.state.generators import Generators, fold_seed, kept_generators, seed_generators, set_generators

HIGH = 2**32


def drawn(seed: int) -> tuple[list[float], float, float]:
    """The first numbers of torch's, Python's and numpy's generators."""
    with kept_generators():
        seed_generators(seed)
        return torch.rand(4).tolist(), random.random(), float(np.random.rand())  # noqa: NPY002 - a model may draw so


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, HIGH - 1])
def test_a_seed_of_32_bits_is_that_of_torch(seed: int) -> None:
    assert drawn(seed)[0] == torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()


def test_seeds_of_equal_low_halves_draw_other_numbers() -> None:
    found = [drawn(low + high * HIGH) for low in (0, 7) for high in (0, 1, 2, 2**16, 2**31 - 1)]
    for each in zip(*found, strict=True):
        assert len({repr(numbers) for numbers in each}) == len(found)


def test_the_high_half_alone_decides_what_is_added_to_the_low_one() -> None:
    """So numbered draws of one seed differ, and so do those of equal numbers of two seeds."""
    for low in (0, 1, HIGH - 1):
        assert len({fold_seed(low + high * HIGH) % HIGH for high in range(5_000)}) == 5_000
    for high in (1, 2**31, HIGH - 1):
        assert len({fold_seed(low + high * HIGH) % HIGH for low in range(5_000)}) == 5_000


@pytest.mark.parametrize("seed", [-(2**63), -1, HIGH, 2**63 - 1, 2**64 - 1])
def test_every_seed_that_torch_takes_is_taken(seed: int) -> None:
    folded = fold_seed(seed)
    assert -(2**63) <= folded < 2**64
    assert folded >> 32 == seed >> 32
    drawn(seed)


def test_written_states_are_those_that_were_read() -> None:
    device = torch.device("cpu")

    def numbers() -> tuple[list[float], list[float], list[float]]:
        pair = [random.gauss(0, 1), random.random()]
        return torch.randn(3).tolist(), pair, np.random.standard_normal(3).tolist()  # noqa: NPY002 - a model may draw so

    with kept_generators():
        seed_generators(11)
        # of a pair of normal numbers the second one waits in the state
        numbers()
        start = Generators.here(device)
        written = start.tensors()
        expected = numbers()
        for states in (
            start,
            Generators.read(written),
            *(Generators.read({name: each}) for name, each in written.items()),
        ):
            set_generators(states, device)
        assert numbers() == expected
        set_generators(start, device)
        assert numbers() == expected
