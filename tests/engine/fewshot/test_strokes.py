"""The stroke alphabet: an image follows from its key alone, splits share no class, and classes can be learned."""

import hashlib
import re
import time
from itertools import pairwise

import pytest
import torch

from engine.fewshot import strokes
from engine.fewshot.episode_loss import episode
from engine.fewshot.strokes import alphabet, draw


def test_an_image_is_the_same_whatever_else_is_drawn() -> None:
    images = alphabet("train", 6, 9, 0)
    assert images.shape == (6, 9, 1, 28, 28)
    assert images.dtype == torch.uint8
    torch.manual_seed(7)
    assert torch.equal(alphabet("train", 3, 4, 0), images[:3, :4])
    assert torch.equal(draw("train", 5, [8, 0, 3], 0), images[5, [8, 0, 3]])
    assert draw("train", 5, [], 0).shape == (0, 1, 28, 28)
    big = draw("train", 5, range(9), 0, image_size=140)
    assert torch.equal(big[8:], draw("train", 5, [8], 0, image_size=140))


def test_images_are_those_of_the_first_release() -> None:
    # a drawing takes single products, sums and square roots, so the digest holds on other machines
    drawn = alphabet("test", 4, 5, 4040, channels=3)
    assert hashlib.sha256(drawn.numpy().tobytes()).hexdigest() == (
        "0ebd21240198dadf6e91119af7c1f48211bf34e7db162dce0162a46bacecace3"
    )


def test_torchs_default_precision_and_generator_play_no_part() -> None:
    wanted = alphabet("test", 2, 3, 1)
    before = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(alphabet("test", 2, 3, 1), wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_no_image_comes_twice_and_splits_and_seeds_differ() -> None:
    digests = [
        hashlib.sha256(image.numpy().tobytes()).digest()
        for seed in (0, 1)
        for split in ("train", "validation", "test")
        for image in alphabet(split, 8, 6, seed).flatten(0, 1)
    ]
    assert len(set(digests)) == len(digests)


def test_no_class_of_a_split_is_one_of_another() -> None:
    classes = [
        strokes._class_strokes(0, first + index).numpy().tobytes()
        for first in strokes._FIRST_CLASS.values()
        for index in range(200)
    ]
    assert len(set(classes)) == len(classes)
    first = sorted(strokes._FIRST_CLASS.values())
    assert all(two - one >= strokes._RANGE for one, two in pairwise(first))
    assert first[-1] + strokes._RANGE <= 2**32


def test_strokes_are_long_enough_and_mostly_joined() -> None:
    joined = []
    for number in range(300):
        curves = strokes._class_strokes(1, number)
        assert 2 <= len(curves) <= 4
        assert float((curves[:, 2] - curves[:, 0]).norm(dim=1).min()) >= 0.25
        joined += [torch.equal(before[2], after[0]) for before, after in pairwise(curves)]
    assert sum(joined) / len(joined) == pytest.approx(0.6, abs=0.09)


def test_channels_are_one_drawing_with_noise_of_their_own() -> None:
    images = alphabet("train", 4, 6, 0, image_size=64, channels=3).float() / 255
    assert images.shape == (4, 6, 3, 64, 64)
    apart = images[:, :, 0] - images[:, :, 1]
    assert 0 < float(apart.abs().mean()) < 0.15
    paper = images[..., :4, :4]
    # noise of 0.1 around 0, of which the negative half is cut off
    assert float(paper.mean()) == pytest.approx(0.04, abs=0.01)


def test_the_nearest_mean_of_pixels_is_far_above_chance_and_below_all() -> None:
    images = alphabet("test", 30, 25, 0).float().flatten(2) / 255
    accuracies = {}
    for shots in (1, 5):
        hits = []
        for index in range(100):
            drawn = episode(index, 0, [25] * 30, 5, shots, 15)
            x = torch.stack([images[c][list(each)] for c, each in zip(drawn.classes, drawn.images, strict=True)])
            nearest = torch.cdist(x[:, shots:].flatten(0, 1), x[:, :shots].mean(1)).argmin(1)
            hits.append((nearest == torch.arange(5).repeat_interleave(15)).float().mean())
        accuracies[shots] = float(torch.stack(hits).mean())
    assert 0.4 < accuracies[1] < accuracies[5] - 0.1 < 0.85


def test_3600_images_take_four_seconds_at_most() -> None:
    begun = time.process_time()
    alphabet("train", 60, 60, 0)
    assert time.process_time() - begun <= 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: alphabet("novel", 1, 1, 0), "`split` must be one of train, validation, test (got 'novel')"),
        (lambda: alphabet("train", 0, 1, 0), "`classes` and `per_class` must be at least 1 (got 0 and 1)"),
        (lambda: alphabet("train", 1, 1, 0, image_size=-1), "must be at least 1 (got -1 and 1)"),
        (lambda: draw("train", -1, [0], 0), "`class_index` must be from 0 to 1073741823 (got -1)"),
        (
            lambda: draw("train", 0, [0], 0, image_size=0),
            "`image_size` and `channels` must be at least 1 (got 0 and 1)",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()  # type: ignore[operator]
