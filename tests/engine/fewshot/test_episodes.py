"""Episodes: the same whatever came before, without repetition, uniform over classes and images."""

import re
from collections import Counter

import pytest
import torch

from engine.fewshot.episode_loss import episode

SIZES = [30, 21, 40, 25, 60, 22, 33]


def test_an_episode_does_not_depend_on_those_before_it() -> None:
    def draw(index: int, seed: int = 3) -> object:
        return episode(index, seed, SIZES, 5, 5, 16)

    forwards = [draw(index) for index in range(20)]
    torch.manual_seed(99)
    torch.rand(7)
    assert [draw(index) for index in reversed(range(20))] == forwards[::-1]
    assert draw(17) == forwards[17]
    assert len(set(map(str, forwards))) == 20
    assert draw(0, seed=4) != forwards[0]


def test_an_episode_leaves_torchs_own_generator_alone() -> None:
    before = torch.random.get_rng_state()
    episode(0, 0, SIZES, 5, 5, 16)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_no_class_and_no_image_comes_twice() -> None:
    for index in range(200):
        drawn = episode(index, 0, SIZES, 5, 5, 16)
        assert len(set(drawn.classes)) == len(drawn.classes) == 5
        assert len(drawn.images) == 5
        for number, images in zip(drawn.classes, drawn.images, strict=True):
            assert len(set(images)) == len(images) == 21
            assert 0 <= min(images) <= max(images) < SIZES[number]


def test_classes_and_images_are_uniform_at_every_place() -> None:
    episodes = [episode(index, 1, [6] * 8, 3, 1, 2) for index in range(4000)]
    for place in range(3):
        classes = Counter(each.classes[place] for each in episodes)
        images = Counter(each.images[place][0] for each in episodes)
        # 4.5 deviations of a binomial number
        for counts, kinds in ((classes, 8), (images, 6)):
            assert set(counts) == set(range(kinds))
            bound = 4.5 * (4000 / kinds * (1 - 1 / kinds)) ** 0.5
            assert max(abs(each - 4000 / kinds) for each in counts.values()) <= bound
    pairs = Counter(tuple(sorted(each.classes[:2])) for each in episodes)
    assert len(pairs) == 28
    assert max(abs(each - 4000 / 28) for each in pairs.values()) <= 4.5 * (4000 / 28) ** 0.5


def test_every_class_and_image_may_be_needed() -> None:
    drawn = episode(0, 0, [3, 3], 2, 1, 2)
    assert sorted(drawn.classes) == [0, 1]
    assert all(sorted(images) == [0, 1, 2] for images in drawn.images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_way": 8}, "an episode of 8 classes needs as many, and the split has 7"),
        (
            {"n_query": 17},
            "class 1 has 21 images, and an episode takes 22 of a class: 5 for the support and 17 queries",
        ),
        ({"n_query": 17, "class_names": list("abcdefg")}, "class 'b' has 21 images"),
        ({"k_shot": 0}, "`n_way`, `k_shot` and `n_query` must be at least 1 (got 5, 0 and 16)"),
    ],
)
def test_too_few_classes_or_images_are_refused(options: dict[str, object], message: str) -> None:
    chosen: dict[str, object] = {"n_way": 5, "k_shot": 5, "n_query": 16, **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        episode(0, 0, SIZES, **chosen)  # type: ignore[arg-type]
