"""Episodes of few-shot learning: n classes, and of each class k support images and some queries.

Classes are drawn without replacement, and so are the images of each. Everything follows from seed and number of the
episode alone: episode i is the same after any others, or none.

References:
    Chen et al. (2019), A closer look at few-shot classification
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import FewShotRefused
from engine.model.counter_rng import keyed_generator


@dataclass(frozen=True)
class Episode:
    """The images of an episode, by class."""

    classes: tuple[int, ...]
    """Indices of the classes; a class's label is its place in here."""
    images: tuple[tuple[int, ...], ...]
    """Indices of images within their class, shape (n_way, k_shot + n_query), the support first."""


def episode(
    index: int,
    seed: int,
    class_sizes: Sequence[int],
    n_way: int,
    k_shot: int,
    n_query: int,
    class_names: Sequence[str] | None = None,
) -> Episode:
    """Draw an episode of a split.

    Args:
        index: The episode's number; those of one seed differ from one another.
        seed: The seed of the split's episodes.
        class_sizes: Images of each of the split's classes.
        n_way: Classes of an episode.
        k_shot: Support images of a class.
        n_query: Queries of a class.
        class_names: Names of the classes, for messages; None numbers them.

    Returns:
        The episode.

    Raises:
        FewShotRefused: If there are fewer classes than ``n_way``, or a class, drawn or not, has too few images.
    """
    wanted = k_shot + n_query
    if min(n_way, k_shot, n_query) < 1:
        raise FewShotRefused(
            f"`n_way`, `k_shot` and `n_query` must be at least 1 (got {n_way}, {k_shot} and {n_query})"
        )
    if len(class_sizes) < n_way:
        raise FewShotRefused(
            f"an episode of {n_way} classes needs as many, and the split has {len(class_sizes)}; lower `n_way`, or "
            "give data with more classes"
        )
    for number, size in enumerate(class_sizes):
        if size < wanted:
            name = f"class {number}" if class_names is None else f"class {class_names[number]!r}"
            raise FewShotRefused(
                f"{name} has {size} images, and an episode takes {wanted} of a class: {k_shot} for the support and "
                f"{n_query} queries; lower `k_shot` or `n_query`, or leave the class out"
            )
    generator = keyed_generator(f"{seed}/episode", index)
    classes = torch.randperm(len(class_sizes), generator=generator)[:n_way].tolist()
    images = (torch.randperm(class_sizes[each], generator=generator)[:wanted].tolist() for each in classes)
    return Episode(tuple(classes), tuple(tuple(each) for each in images))
