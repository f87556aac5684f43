"""Heads of few-shot learning: scores of queries for each class, from the class's support images.

n classes with k support images each, and m queries; scores (m, n) are logits, whose cross-entropy is the loss. Queries
do not see each other, so a head may take them a few at a time.

::

    method                             head
    ProtoNet                           minus the squared distance to the mean of the class
    CTX_softmax, CTX_cosine            minus the squared distance to a prototype that attends to the query
    FSCT_softmax, FSCT_cosine          a transformer's layer between prototypes and queries, and a readout
    ProFOCT_softmax, ProFOCT_cosine    the same head; its loss has variance and covariance terms beside

References:
    Snell et al. (2017), Prototypical networks for few-shot learning
    Doersch et al. (2020), CrossTransformers: spatially-aware few-shot transfer
    IEEE Access (2023), doi 10.1109/ACCESS.2023.3298299, Few-shot cosine transformer
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from engine.errors import FewShotRefused
from engine.fewshot.cosine_transformer import FewShotTransformer
from engine.fewshot.head import EPSILON, Attention, Head, widened, without_autocast

METHODS = ("ProtoNet", "CTX_softmax", "CTX_cosine", "FSCT_softmax", "FSCT_cosine", "ProFOCT_softmax", "ProFOCT_cosine")


class ProtoNet(Head):
    """score[i, c] = −‖z_i − P_c‖², with P_c the mean of the class's support features.

    It has no parameters, and takes features of any shape and any number of shots.
    """

    @override
    def forward(self, support: Tensor, queries: Tensor) -> Tensor:
        with without_autocast(support.device):
            prototypes = widened(support).flatten(2).mean(1)
            distances = widened(queries).flatten(1)[:, None] - prototypes
            return -distances.square().sum(-1)


class CTX(Head):
    """CrossTransformers: each query has prototypes of its own, made by attention to the support.

    `spatial`, the published form: φ and ψ are 1×1 convolutions without bias, to e channels. With t over all k·h·w
    positions of a class's support maps and s over those of the query,

        A[i, c, s, t] = softmax_t(φ(q_i)_s · φ(c)_t / √e), or the cosine of the two without softmax
        p[i, c, s] = Σ_t A[i, c, s, t] ψ(c)_t
        score[i, c] = −Σ_s ‖ψ(q_i)_s − p[i, c, s]‖² / (h·w)

    `shots`, as a public implementation computes it: φ = ψ, each map is one vector of e·h·w numbers, and attention runs
    over the k shots alone, scaled by 1/√e although the vectors are longer. With one shot its softmax is 1.

    Cosines are not divided by their sum in either form, so that prototypes grow with the number of terms: the published
    method, and slow to learn with several shots.

    Attention of `spatial` holds m·n·(h·w)·k·(h·w) numbers: take queries a few at a time where that is much.
    """

    def __init__(
        self,
        channels: int,
        *,
        attention: Attention = "softmax",
        form: Literal["spatial", "shots"] = "spatial",
        width: int = 128,
    ) -> None:
        """Draw the convolutions by torch's own generator.

        Args:
            channels: c of the maps (c, h, w).
            attention: `softmax`, or `cosine`, which has no softmax.
            form: `spatial` attends to positions, `shots` to whole images.
            width: e, channels of keys and values.

        Raises:
            FewShotRefused: If ``attention`` or ``form`` is none of these.
        """
        super().__init__()
        if attention not in ("softmax", "cosine") or form not in ("spatial", "shots"):
            raise FewShotRefused(
                f"`attention` must be softmax or cosine, and `form` spatial or shots (got {attention!r} and {form!r})"
            )
        self.attention, self.form, self.width = attention, form, width
        self.keys = nn.Conv2d(channels, width, 1, bias=False)
        self.values = nn.Conv2d(channels, width, 1, bias=False) if form == "spatial" else self.keys

    @override
    def forward(self, support: Tensor, queries: Tensor) -> Tensor:
        ways, _, *shape = support.shape
        if len(shape) != 3:
            raise FewShotRefused(f"CTX needs maps (c, h, w), and got features {tuple(shape)}; take `pool: map`")
        positions = shape[1] * shape[2]
        query_keys, query_values = self._rows(queries)
        class_keys, class_values = (
            rows.reshape(ways, -1, rows.shape[-1]) for rows in self._rows(support.flatten(0, 1))
        )
        with without_autocast(support.device):
            if self.attention == "cosine":
                query_keys = normalize(query_keys, dim=-1, eps=EPSILON)
                class_keys = normalize(class_keys, dim=-1, eps=EPSILON)
            weights = torch.einsum("ise,cte->icst", query_keys, class_keys)
            if self.attention == "softmax":
                weights = torch.softmax(weights / math.sqrt(self.width), dim=-1)
            prototypes = torch.einsum("icst,cte->icse", weights, class_values)
            return -(query_values[:, None] - prototypes).square().sum((-2, -1)) / positions

    def _rows(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of maps (m, c, h, w), each (m, h·w, e), or (m, 1, e·h·w) by `shots`."""
        keys = widened(self.keys(maps))
        if self.form == "shots":
            rows = keys.flatten(1)[:, None]
            return rows, rows
        return keys.flatten(2).mT, widened(self.values(maps)).flatten(2).mT


def make_head(
    method: str,
    *,
    k_shot: int,
    feature_shape: tuple[int, ...],
    form: Literal["spatial", "shots"] = "spatial",
    readout: Literal["cosine", "linear"] | None = None,
    heads: int = 8,
    head_dim: int = 64,
    hidden: int = 512,
) -> Head:
    """Make the head of a method, with weights drawn by torch's own generator.

    Args:
        method: One of ``METHODS``.
        k_shot: Support images of a class. FSCT and ProFOCT have a weight for each and take no other number.
        feature_shape: One image's features, as ``Backbone.feature_shape`` computes it; CTX needs (c, h, w).
        form: That of CTX.
        readout: That of FSCT; None takes `cosine` with cosine attention and `linear` with softmax, as published.
        heads: Heads of FSCT's attention.
        head_dim: Numbers of each of them.
        hidden: Numbers between the two layers of FSCT's feed-forward part.

    Returns:
        The head, in training mode.

    Raises:
        FewShotRefused: If the method is unknown, or the features are not such as it takes.
    """
    if method not in METHODS:
        raise FewShotRefused(f"`method` must be one of {', '.join(METHODS)} (got {method!r})")
    if method == "ProtoNet":
        return ProtoNet()
    attention: Attention = "cosine" if method.endswith("_cosine") else "softmax"
    if method.startswith("CTX"):
        if len(feature_shape) != 3:
            raise FewShotRefused(f"{method} needs maps (c, h, w), and got features {feature_shape}; take `pool: map`")
        return CTX(feature_shape[0], attention=attention, form=form)
    return FewShotTransformer(
        math.prod(feature_shape),
        k_shot,
        attention=attention,
        readout=readout or ("cosine" if attention == "cosine" else "linear"),
        heads=heads,
        head_dim=head_dim,
        hidden=hidden,
    )
