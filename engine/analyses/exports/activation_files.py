"""Files of A alone: GPTQ's Hessians, CorDA's covariances, and the second moments of ROME and MEMIT.

The factor that GPTQ solves with: U upper triangular with UᵀU = (H + λ I)⁻¹, and the smallest λ that it takes.

``H + λ I = R Rᵀ`` with R upper triangular is the Cholesky factorisation from the last row to the first, so that
``U = R⁻¹`` is had without the inverse itself, and its error grows with the condition number once.

References:
    Frantar, Ashkboos, Hoefler & Alistarh (2023), GPTQ, section 3: the Cholesky form
    Higham (2002), Accuracy and stability of numerical algorithms, 10.1
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from engine.analyses.exports.exported_file import (
    ExportedFile,
    ExportRefused,
    activation_refusal,
    count_refusal,
    item_bytes,
    require_finite,
    without_bias,
)
from engine.analyses.exports.kronecker_files import member_name, npz_bytes, save_with_torch, write_zip
from engine.factors.factor_set import LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.linalg.eigensolvers import LARGEST
from engine.tensor_file import MEDIA_TYPE, Sink, tensor_file_parts

SOLVING_BYTES = 48
"""Bytes for each number of a Hessian while its factor is made: six matrices in float64."""


@dataclass(frozen=True, kw_only=True)
class SolvingFactor:
    """The factor of one Hessian."""

    upper: Tensor
    """U (n, n), float64, upper triangular."""
    damping: float
    """λ, 0 where H's own condition number is small enough."""
    condition: float | None
    """Condition number of H; None where H is singular, or has a negative eigenvalue by rounding."""


def solving_factor(hessian: Tensor, kappa_max: float) -> SolvingFactor | None:
    """Return the Cholesky factor of the inverse of a Hessian with the least damping that bounds its condition number.

    ``λ = max(0, (λ_max − κ λ_min) / (κ − 1))`` is the smallest with ``(λ_max + λ) / (λ_min + λ) ≤ κ``. Where float64
    does not resolve so large a κ, it is doubled until the factorisation succeeds.

    H (n, n) is symmetric, of any float dtype, and may have eigenvalues that are negative by rounding; ``kappa_max`` is
    κ, ``ValueError`` if it is not above 1. The factor is in float64; None where H has no positive eigenvalue, so that
    no λ is the smallest. ``SOLVING_BYTES`` are held for each number of H.
    """
    if not kappa_max > 1:
        raise ValueError(f"a condition number is above 1 (got {kappa_max})")
    matrix = hessian.to(torch.float64)
    values = torch.linalg.eigvalsh(matrix)
    least, largest = float(values[0]), float(values[-1])
    if not largest > 0:
        return None
    damping = max(0.0, (largest - kappa_max * least) / (kappa_max - 1))
    # the factorisation from the last row to the first: that of the matrix turned by half a circle, turned back
    turned = matrix.flip(0, 1)
    del matrix
    upper, failed = torch.linalg.cholesky_ex(_damped(turned, damping))
    while int(failed):
        # a condition number beyond what float64 resolves
        damping = max(2 * damping, len(turned) * torch.finfo(torch.float64).eps * largest)
        upper, failed = torch.linalg.cholesky_ex(_damped(turned, damping))
    del turned
    upper = upper.flip(0, 1)
    identity = torch.eye(upper.shape[0], dtype=torch.float64, device=upper.device)
    return SolvingFactor(
        upper=torch.linalg.solve_triangular(upper, identity, upper=True),
        damping=damping,
        condition=largest / least if least > torch.finfo(torch.float64).eps * largest else None,
    )


def _damped(matrix: Tensor, damping: float) -> Tensor:
    damped = matrix.clone()
    damped.diagonal().add_(damping)
    return damped


class GptqFile(ExportedFile):
    """`{layer}.hessian`, 2·A, and `{layer}.cholesky_inverse`, U with UᵀU = (H + λ I)⁻¹."""

    format = "gptq"
    media_type = MEDIA_TYPE
    convention = (
        "hessian is H = 2·A, A the mean of a·aᵀ over all positions (tokens), without the bias; of one pass over the "
        "model as it stands, whereas sequential GPTQ collects each layer after the ones before it are quantised. "
        "cholesky_inverse is U, upper triangular, with UᵀU = (H + λI)⁻¹ and λ the damping of the layer: give a tool "
        "that factors by itself H + λI and no damping of its own."
    )

    @override
    def why_not(self, facts: LayerFacts) -> str | None:
        if facts.in_dim > LARGEST:
            return f"has {facts.in_dim:,} inputs, and eigensolvers take {LARGEST:,} rows"
        return activation_refusal(facts)

    @override
    def tensors_of(self, facts: LayerFacts, factors: Factors) -> tuple[dict[str, Tensor], dict[str, float | None]]:
        kept, cut = without_bias(facts, factors.widened_A)
        hessian = 2 * kept
        require_finite(facts, "hessian", hessian)
        found = solving_factor(hessian, self.kappa_max) if self.kappa_max is not None else None
        if found is None:
            raise ExportRefused(
                f"layer `{facts.name}` has an A without a positive eigenvalue, which nothing solves with: its inputs "
                "are 0 on these data; leave it out by `export.without`",
                layer=facts.name,
                pointer="/export/without",
            )
        tensors = {f"{facts.name}.hessian": hessian, f"{facts.name}.cholesky_inverse": found.upper}
        return tensors, {"cut_share": cut, "damping": found.damping, "condition": found.condition}

    @override
    def bytes_of(self, facts: LayerFacts) -> int:
        return facts.in_dim**2 * (8 + item_bytes(self.whole))

    @override
    def work_bytes(self, facts: LayerFacts) -> int:
        return SOLVING_BYTES * facts.in_dim**2

    @override
    def write(self, file: Sink) -> None:
        for part in tensor_file_parts(self.tensors, self.metadata()):
            file.write(part)


class CordaFile(ExportedFile):
    """A dictionary of A by the names of the modules, as `covariance_file` of PEFT's CorDA."""

    format = "corda"
    media_type = "application/octet-stream"
    convention = (
        "A by the name of its module: the mean of a·aᵀ over all positions, without the bias. CorDA's own is a mean "
        "over samples, each divided by its largest number, so it weighs samples otherwise; its scale has no effect."
    )

    @override
    def why_not(self, facts: LayerFacts) -> str | None:
        return activation_refusal(facts) or self.module_refusal(facts)

    @override
    def tensors_of(self, facts: LayerFacts, factors: Factors) -> tuple[dict[str, Tensor], dict[str, float | None]]:
        kept, cut = without_bias(facts, factors.widened_A)
        return {self.module_of(facts) or "": kept}, {"cut_share": cut}

    @override
    def bytes_of(self, facts: LayerFacts) -> int:
        return facts.in_dim**2 * item_bytes(self.whole)

    @override
    def write(self, file: Sink) -> None:
        # no module can have this name, which ends in a dot
        save_with_torch({**self.tensors, "kronoscope.": self.metadata()}, file)


class SecondMomentFile(ExportedFile):
    """`{layer}.npz` with `mom2.constructor`, `mom2.count` and `mom2.mom2`, in a zip."""

    format = "mom2"
    media_type = "application/zip"
    convention = (
        "mom2.mom2 is the sum of a·aᵀ over mom2.count positions, without the bias: divided by the count it is A, the "
        "second moment that ROME and MEMIT invert. sample_size is the number of examples: their `mom2_n_samples`."
    )

    @override
    def why_not(self, facts: LayerFacts) -> str | None:
        return activation_refusal(facts) or count_refusal(facts)

    @override
    def tensors_of(self, facts: LayerFacts, factors: Factors) -> tuple[dict[str, Tensor], dict[str, float | None]]:
        kept, cut = without_bias(facts, factors.widened_A)
        return {facts.name: kept * _count(facts)}, {"cut_share": cut}

    @override
    def bytes_of(self, facts: LayerFacts) -> int:
        return facts.in_dim**2 * item_bytes(self.whole)

    @override
    def write(self, file: Sink) -> None:
        def members() -> Iterator[tuple[str, Iterable[bytes]]]:
            yield "kronoscope.json", [json.dumps(self.metadata(), sort_keys=True).encode()]
            for facts in self.exported:
                entries: dict[str, Tensor | str] = {
                    "mom2.constructor": "util.runningstats.SecondMoment()",
                    "mom2.count": torch.tensor(round(_count(facts))),
                    "mom2.mom2": self.tensors[facts.name],
                    "sample_size": torch.tensor(self.whole.examples),
                }
                yield member_name(facts.name, facts.ordinal, ".npz"), [npz_bytes(entries)]

        write_zip(file, members())


def _count(facts: LayerFacts) -> float:
    """The positions that A was divided by, which ``count_refusal`` has asked for."""
    return facts.sums.weight_A if facts.sums is not None else 0.0
