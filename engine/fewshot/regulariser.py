"""The regulariser of ProFOCT: variance and covariance of features, and weights that follow the losses.

For rows Z (n, d), with Zc = Z − mean, Cov = Zcᵀ Zc/(n − 1) and var its diagonal:

    V = mean_j max(0, τ − √(var_j + 1e-8))
    C = (1/d) Σ_{i≠j} Cov_ij²
    loss = cross-entropy + α V + β I + γ C

The published I is the constant 0, since there is no second view of an image: β has no effect, and is carried along as
the scripts compute it. C needs no d × d matrix: with K = Zc Zcᵀ (n × n), and since ‖Zcᵀ Zc‖ = ‖Zc Zcᵀ‖,

    C = (1/d) [‖K‖² / (n − 1)² − Σ_j var_j²]

which takes n² d operations in place of n d². Of 25 rows of 25,088 numbers the dense matrix takes 2.35 GiB, K 2.5 KB.

References:
    Bardes et al. (2022), VICReg: variance-invariance-covariance regularization for self-supervised learning
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import FewShotRefused
from engine.fewshot.head import widened, without_autocast

_EPSILON = 1e-8
_CANCELLED = 1e-4
"""The share of ‖K‖²/(n − 1)² below which float32 has lost too much of the difference."""
_MOMENTUM = 0.9


def variance(features: Tensor, threshold: float) -> Tensor:
    """Return V, how far features' standard deviations are below a threshold τ (1 in VICReg), on average.

    Features and errors are those of ``covariance``. Equal rows give τ − 1e-4, and the gradient 0.
    """
    with without_autocast(features.device):
        centred = _centred(features)
        deviations = (centred.square().sum(0) / (len(centred) - 1) + _EPSILON).sqrt()
        return (threshold - deviations).clamp(min=0).mean()


def covariance(features: Tensor) -> Tensor:
    """Return C, the sum of squared covariances between different features, over their number.

    It is computed from K where n < d, and from Cov otherwise. Where float32 would lose more than four digits of the
    difference, it is computed once more in float64; the decision reads the value, which a device waits for.

    Args:
        features: Z, shape (n, *feature), any float dtype; n is at least 2.

    Returns:
        A number, in float32 or wider. Equal rows give 0, and the gradient 0.

    Raises:
        FewShotRefused: If there are fewer than two rows.

    Memory:
        About six times ``features``, with the gradient.
    """
    with without_autocast(features.device):
        centred = _centred(features)
        rows, numbers = centred.shape
        if rows >= numbers:
            between = centred.mT @ centred / (rows - 1)
            return (between - between.diagonal().diag_embed()).square().sum() / numbers
        whole, own = _gram_norms(centred)
        if centred.dtype == torch.float32 and not centred.is_meta and bool(whole - own < _CANCELLED * whole):
            whole, own = _gram_norms(centred.double())
        return ((whole - own) / numbers).to(centred.dtype)


@dataclass(frozen=True)
class VicWeights:
    """Weights α, β, γ of the terms V, I and C, at the values that the published scripts begin with."""

    alpha: float = 0.5
    beta: float = 9.0
    gamma: float = 0.5

    def after(self, variance: float, covariance: float, cross_entropy: float) -> "VicWeights":
        """Return the weights of the next episode by the dynamic rule, through which no gradient flows.

        With r the values V, C and cross-entropy over their sum + 1e-8, each weight moves a tenth of its way to

            α* = 0.5 + 2 r_V,    β* = 9 (1 − 0.5 r_CE),    γ* = 0.5 + 2 r_C

        and stays within α, γ ∈ [0.1, 5] and β ∈ [1, 20].
        """
        total = variance + covariance + cross_entropy + 1e-8
        return VicWeights(
            alpha=_moved(self.alpha, 0.5 + 2 * variance / total, 0.1, 5),
            beta=_moved(self.beta, 9 * (1 - 0.5 * cross_entropy / total), 1, 20),
            gamma=_moved(self.gamma, 0.5 + 2 * covariance / total, 0.1, 5),
        )


def _moved(weight: float, aim: float, least: float, most: float) -> float:
    return min(max(_MOMENTUM * weight + (1 - _MOMENTUM) * aim, least), most)


def _centred(features: Tensor) -> Tensor:
    """Zc (n, d), in which equal rows are exactly 0: the first is taken away before the mean, which changes nothing."""
    rows = widened(features).flatten(1)
    if len(rows) < 2:
        raise FewShotRefused(f"variance and covariance need at least 2 rows of features (got {len(rows)})")
    shifted = rows - rows[0].detach()
    return shifted - shifted.mean(0)


def _gram_norms(centred: Tensor) -> tuple[Tensor, Tensor]:
    """‖Cov‖² and Σ var²."""
    freedom = len(centred) - 1
    gram = centred @ centred.mT
    return gram.square().sum() / freedom**2, (centred.square().sum(0) / freedom).square().sum()
