"""Ways to the undivided gradient: which there are, and which is chosen."""

import pytest
import torch

from engine.training.ways import Way, dense_covariance_bytes, exact_ways

IMAGES = 105


def test_coupled_images_are_never_sliced() -> None:
    assert exact_ways(IMAGES, coupled=True, has_chain=True, least_slices=4) == (Way(), Way(checkpointing=True))
    assert exact_ways(IMAGES, coupled=True, has_chain=False) == (Way(),)


def test_uncoupled_images_are_sliced_down_to_one_with_and_without_checkpointing() -> None:
    ways = exact_ways(IMAGES, coupled=False, has_chain=True)
    chunks = [way.chunk for way in ways if not way.checkpointing]

    assert chunks == [None, 53, 35, 27, 18, 14, 9, 7, 5, 4, 3, 2, 1]
    assert {way.chunk for way in ways if way.checkpointing} == set(chunks)
    assert ways[0] == Way()
    costs = [way.relative_cost(IMAGES) for way in ways]
    assert costs == sorted(costs)


@pytest.mark.parametrize("images", [1, 2, 3, 4, 7, 30])
@pytest.mark.parametrize("least", [1, 2, 5])
def test_slices_are_at_least_those_asked_for(images: int, least: int) -> None:
    ways = exact_ways(images, coupled=False, has_chain=False, least_slices=least)

    assert ways
    assert all(way.slices(images) >= min(least, images) for way in ways)
    assert len(set(ways)) == len(ways)


def test_passes_cost_a_third_each() -> None:
    assert Way().relative_cost(IMAGES) == 1
    assert Way(checkpointing=True).relative_cost(IMAGES) == pytest.approx(4 / 3)
    assert Way(chunk=53).relative_cost(IMAGES) == pytest.approx(4 / 3, abs=0.02)
    assert Way(chunk=53, checkpointing=True).relative_cost(IMAGES) == pytest.approx(5 / 3, abs=0.02)


def test_ways_have_the_dtype_that_the_caller_wants() -> None:
    ways = exact_ways(8, coupled=False, has_chain=True, compute_dtype=torch.bfloat16)

    assert {way.compute_dtype for way in ways} == {torch.bfloat16}
    assert ways[0].described == "undivided, bfloat16"


def test_a_dense_covariance_of_25088_features_takes_over_nine_gib() -> None:
    assert 9.2 <= dense_covariance_bytes(25, 25088) / 2**30 <= 9.4
