"""The loss of an episode, as terms that sum to it and are differentiated one at a time.

    loss = Σ_c (m_c / m) CE_c + α V + γ C  (+ (α V′ + γ C′) / 2)

CE_c is the mean cross-entropy over m_c of the m queries: queries do not see each other in a head, so slices of any
sizes weigh m_c / m and sum to that of all of them. V and C are those of the support's features, n_way · k_shot rows.
V′ and C′ are those of the attention's output, whose m · n_way rows need all queries at once; they are not detached,
since then their gradient would be 0.

Episodes of few-shot learning: n classes, and of each class k support images and some queries.

Classes are drawn without replacement, and so are the images of each. Everything follows from seed and number of the
episode alone: episode i is the same after any others, or none.

References:
    Chen et al. (2019), A closer look at few-shot classification
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from engine.errors import FewShotRefused, NonFiniteLoss
from engine.fewshot.cosine_transformer import FewShotTransformer
from engine.fewshot.head import Head, widened, without_autocast
from engine.fewshot.regulariser import VicWeights, covariance, variance
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


@dataclass(frozen=True, kw_only=True)
class LossValues:
    """Values of a loss's parts: loss = cross_entropy + α · variance + γ · covariance."""

    cross_entropy: float
    variance: float
    """V, with half of that of the attention's output where it is penalised too; 0 without a penalty."""
    covariance: float
    """C likewise."""
    accuracy: float
    """The share of queries with their class's score the highest."""


@dataclass(kw_only=True)
class EpisodeLoss:
    """The loss of features in the order of an episode: of each class its support images, then its queries.

    A label is the position of the class.
    """

    head: Head
    n_way: int
    k_shot: int
    n_query: int
    vic: tuple[VicWeights, float] | None = None
    """The weights and the threshold τ of the penalty; None has none."""
    on_attention: bool = False
    """Whether half as much again is laid on the attention's output."""
    slices: int = 1
    """Slices of the queries, at most as many as there are; with ``on_attention`` all queries are one."""
    first: int | None = None
    """Slices that are computed, the first and largest ones, for a forecast of memory; None computes all."""
    _sums: dict[str, Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.n_way, self.k_shot, self.n_query, self.slices) < 1:
            raise FewShotRefused(
                f"`n_way`, `k_shot`, `n_query` and `slices` must be at least 1 (got {self.n_way}, {self.k_shot}, "
                f"{self.n_query} and {self.slices})"
            )
        if self.on_attention and (self.vic is None or not isinstance(self.head, FewShotTransformer)):
            raise FewShotRefused(
                f"a penalty on the attention needs `vic` and a FSCT or ProFOCT head (got {type(self.head).__name__} "
                f"and vic {self.vic})"
            )

    def __call__(self, features: Tensor) -> Iterator[Tensor]:
        """Yield terms that sum to the loss, each with a graph of its own from ``features``.

        Differentiate each before asking for the next: its graph is then free.

        Args:
            features: Shape (n_way · (k_shot + n_query), *feature), any float dtype; commonly a leaf.

        Yields:
            Numbers in float32 or wider: the cross-entropy slice by slice, then the penalty.

        Raises:
            FewShotRefused: If there are more or fewer features, or the head takes no such support.
        """
        self._sums = None
        entropies: list[Tensor] = []
        hits: list[Tensor] = []
        penalties: list[tuple[Tensor, Tensor]] = []
        for places in self._query_slices(features):
            scores, out = self._scores(features, places)
            with without_autocast(features.device):
                labels = self._labels(places)
                term = cross_entropy(scores, labels) * (len(places) / (self.n_way * self.n_query))
                entropies.append(term.detach())
                hits.append((scores.detach().argmax(-1) == labels).sum())
                if out is not None and self.vic is not None:
                    term = term + _penalty(self.vic, out.flatten(0, 1), 0.5, penalties)
            del scores, out
            yield term
        if self.vic is not None:
            yield _penalty(self.vic, self._support(features).flatten(0, 1), 1.0, penalties)
        self._sums = {
            "cross_entropy": _sum(entropies),
            "variance": _sum([one for one, _ in penalties]),
            "covariance": _sum([one for _, one in penalties]),
            "accuracy": _sum(hits) / (self.n_way * self.n_query),
        }

    @property
    def values(self) -> LossValues | None:
        """The values of the last call, once its terms are used up; a device is waited for when they are read."""
        if self._sums is None:
            return None
        return LossValues(**{name: float(each) for name, each in self._sums.items()})

    @torch.no_grad()
    def accuracy(self, features: Tensor) -> float:
        """Return the share of queries with their class's score the highest, without a graph.

        The head is taken in the mode that it is in. ``FewShotRefused`` if there are more or fewer features, or the head
        takes no such support; ``NonFiniteLoss`` if a score is NaN or Inf, where the highest means nothing.
        """
        slices, support = self._query_slices(features), self._support(features)
        hits: list[Tensor] = []
        finite: list[Tensor] = []
        for places in slices:
            scores = self.head(support, features[places])
            hits.append((scores.argmax(-1) == self._labels(places)).sum())
            finite.append(scores.isfinite().all())
        if not bool(torch.stack(finite).all()):
            raise NonFiniteLoss(
                "the scores of a test episode must be finite (got NaN or Inf): the weights are too large; take a "
                "smaller learning rate, other `weights`, or full width (use_amp: false) if 16 bits overflow"
            )
        return float(_sum(hits)) / (self.n_way * self.n_query)

    def _support(self, features: Tensor) -> Tensor:
        return features.reshape(self.n_way, -1, *features.shape[1:])[:, : self.k_shot]

    def _query_slices(self, features: Tensor) -> tuple[Tensor, ...]:
        """Places of the queries among the features, slice by slice."""
        size = self.k_shot + self.n_query
        if len(features) != self.n_way * size:
            raise FewShotRefused(
                f"an episode of {self.n_way} classes with {self.k_shot} + {self.n_query} images has "
                f"{self.n_way * size} features (got {len(features)})"
            )
        places = torch.arange(self.n_way * size, device=features.device)
        queries = places.reshape(self.n_way, size)[:, self.k_shot :].flatten()
        slices = 1 if self.on_attention else min(self.slices, len(queries))
        return torch.tensor_split(queries, slices)[: self.first]

    def _labels(self, places: Tensor) -> Tensor:
        return places // (self.k_shot + self.n_query)

    def _scores(self, features: Tensor, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of the queries at these places; and the attention's output, where that is penalised."""
        support, queries = self._support(features), features.index_select(0, places)
        if self.on_attention and isinstance(self.head, FewShotTransformer):
            out = self.head.attention_output(support, queries)
            return widened(self.head.scores_of(out)), out
        return widened(self.head(support, queries)), None


def _penalty(vic: tuple[VicWeights, float], rows: Tensor, share: float, values: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A share of α V + γ C; that share of V and C is appended to the values."""
    weights, threshold = vic
    spread, correlation = share * variance(rows, threshold), share * covariance(rows)
    values.append((spread.detach(), correlation.detach()))
    return weights.alpha * spread + weights.gamma * correlation


def _sum(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum() if values else torch.zeros(())
