"""The few-shot cosine transformer (FSCT): a layer of attention between prototypes and queries, and a readout.

For support Z_s (n, k, d) and queries Z_q (m, d), with P (n, d) the prototypes, f the in-projection, LayerNorm(d) and
then a matrix to `heads` times `head_dim` numbers, one for keys, queries and values:

    P_c = Σ_j softmax_j(w_j) Z_s[c, j]
    a_h[i, c] = cos(f_h(P_c), f_h(Z_q[i]))
    out[i, c] = out_projection(concat_h a_h[i, c] · f_h(Z_q[i])) + P_c
    x = out + feed_forward(out)
    score[i, c] = readout(x[i, c])

The published layer is changed in three places: the cosine layer of the readout normalises features (not classes), a
cosine's norms are bounded from below by 1e-6 and computed in float32 or wider, and the weights w of the shots are
shared by all classes, so that `n_way` may differ between training and testing.

References:
    IEEE Access (2023), doi 10.1109/ACCESS.2023.3298299, Few-shot cosine transformer
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from engine.errors import FewShotRefused
from engine.fewshot.head import EPSILON, Attention, Head, widened, without_autocast


class CosineLayer(nn.Module):
    """2 g ⟨x/‖x‖, v/‖v‖⟩ over the last dimension, with learned v and g."""

    def __init__(self, features: int) -> None:
        super().__init__()
        # v is drawn as nn.Linear draws a row, and g begins at its norm, as under weight normalisation
        self.direction = nn.Parameter(nn.Linear(features, 1, bias=False).weight.detach()[0].clone())
        self.scale = nn.Parameter(self.direction.detach().norm())

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return (...) for x (..., features)."""
        with without_autocast(x.device):
            cosines = normalize(widened(x), dim=-1, eps=EPSILON) @ normalize(self.direction, dim=0, eps=EPSILON)
            return 2 * self.scale * cosines


class FewShotTransformer(Head):
    """The FSCT head, with a weight for each of its k shots.

    With `softmax` attention each query attends to a single key, the prototype of one class, and the softmax over one
    number is the constant 1, as published: a_h[i, c] = 1 for every input. `cosine` is the method that the paper is
    about.

    The tensor (m, n_way, d) between attention and readout is the largest, and about nine of its size are alive in a
    backward pass.
    """

    def __init__(
        self,
        features: int,
        k_shot: int,
        *,
        attention: Attention = "cosine",
        readout: Literal["cosine", "linear"] = "cosine",
        heads: int = 8,
        head_dim: int = 64,
        hidden: int = 512,
    ) -> None:
        """Draw the layers by torch's own generator.

        Args:
            features: d, numbers of one image's features.
            k_shot: Support images of each class; the head takes no other number.
            attention: `cosine`, or `softmax`, which is the constant 1.
            readout: The last layer: a cosine layer, or a linear one.
            heads: Heads of the attention.
            head_dim: Numbers of each of them, and of the readout's inner layer.
            hidden: Numbers between the two layers of the feed-forward part.

        Raises:
            FewShotRefused: If a name is unknown or a number below 1.
        """
        super().__init__()
        if attention not in ("softmax", "cosine") or readout not in ("cosine", "linear"):
            raise FewShotRefused(
                f"`attention` must be softmax or cosine, and `readout` cosine or linear (got {attention!r} and "
                f"{readout!r})"
            )
        if min(features, k_shot, heads, head_dim, hidden) < 1:
            raise FewShotRefused(
                f"`features`, `k_shot`, `heads`, `head_dim` and `hidden` must be at least 1 (got {features}, {k_shot}, "
                f"{heads}, {head_dim} and {hidden})"
            )
        self.k_shot, self.attention, self.heads = k_shot, attention, heads
        inner = heads * head_dim
        self.shot_weights = nn.Parameter(torch.ones(k_shot))
        self.in_projection = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, inner, bias=False))
        self.out_projection = nn.Linear(inner, features)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(features), nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features)
        )
        last = CosineLayer(head_dim) if readout == "cosine" else nn.Sequential(nn.Linear(head_dim, 1), nn.Flatten(-2))
        self.readout = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, head_dim), last)

    @override
    def forward(self, support: Tensor, queries: Tensor) -> Tensor:
        return self.scores_of(self.attention_output(support, queries))

    def attention_output(self, support: Tensor, queries: Tensor) -> Tensor:
        """Return out (m, n_way, d), which a penalty may be laid on.

        Support is (n_way, k_shot, *feature), of d numbers each, queries (m, *feature). ``FewShotRefused`` if there are
        more or fewer shots than the head has weights for.
        """
        shots = support.shape[1]
        if shots != self.k_shot:
            raise FewShotRefused(
                f"`k_shot` must be {self.k_shot}, for which this head was built (got {shots}); it has a weight for "
                "each shot: test with as many as it was trained with"
            )
        prototypes = torch.einsum("j,cjd->cd", torch.softmax(self.shot_weights, 0), support.flatten(2))
        values = self.in_projection(queries.flatten(1))
        if self.attention == "softmax":
            shared: Tensor = self.out_projection(values)
            return shared[:, None] + prototypes
        by_head = values.unflatten(-1, (self.heads, -1))
        keys = self.in_projection(prototypes).unflatten(-1, (self.heads, -1))
        with without_autocast(support.device):
            directions = (normalize(widened(each), dim=-1, eps=EPSILON) for each in (by_head, keys))
            cosines = torch.einsum("ihe,che->ich", *directions)
        attended = (cosines[..., None] * by_head[:, None]).flatten(-2)
        out: Tensor = self.out_projection(attended) + prototypes
        return out

    def scores_of(self, out: Tensor) -> Tensor:
        """Return the scores (m, n_way) of out (m, n_way, d)."""
        scores: Tensor = self.readout(out + self.feed_forward(out))
        return widened(scores)
