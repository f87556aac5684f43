"""Files of A alone: GPTQ's Hessians, CorDA's covariances, and the second moments of ROME and MEMIT."""

import json
from collections.abc import Iterable, Iterator

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
from engine.analyses.exports.file_layouts import member_name, npz_bytes, save_with_torch, write_zip
from engine.analyses.exports.solving_factor import SOLVING_BYTES, solving_factor
from engine.factors.factor_set import LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.linalg.eigensolvers import LARGEST
from engine.tensor_file import MEDIA_TYPE, Sink, tensor_file_parts


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
