"""Files of A and G: the sums and counts of kronfluence, and the Kronecker factors of laplace-torch.

Layouts of files that other tools read: zip, npz and torch's own, with equal bytes for equal contents.
"""

import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Literal, cast

import torch
from torch import Tensor
from typing_extensions import override

from engine.analyses.exports.exported_file import (
    ExportedFile,
    ExportRefused,
    activation_refusal,
    count_refusal,
    dense_gradient,
    gradient_refusal,
    item_bytes,
    without_bias,
)
from engine.analyses.exports.model_outputs import known_outputs
from engine.factors.factor_set import LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.layers.parameter_slice import Window
from engine.tensor_file import Sink, tensor_bytes, tensor_file_parts

_MOMENT = (1980, 1, 1, 0, 0, 0)
"""The time of every member: that of the writing would make each file another one."""
_UNSAFE = re.compile(r"[^\w.\-\[\]]", re.ASCII)
_MOST_NAME_CHARACTERS = 100
_NPY = {torch.float32: "<f4", torch.float64: "<f8", torch.int64: "<i8"}


def member_name(layer: str, ordinal: int, ending: str) -> str:
    """Return the name of a layer's member, a file name on any system; the ordinal tells changed names apart."""
    safe = _UNSAFE.sub("_", layer)[:_MOST_NAME_CHARACTERS]
    plain = safe == layer and safe and not safe.startswith(".")
    return f"{safe}{ending}" if plain else f"{ordinal}_{safe.lstrip('.')}{ending}"


def write_zip(file: Sink, members: Iterable[tuple[str, Iterable[bytes]]]) -> None:
    """Write a zip without compression, of each member's parts in order."""
    with zipfile.ZipFile(cast("IO[bytes]", file), "w") as archive:
        for name, parts in members:
            with archive.open(zipfile.ZipInfo(name, _MOMENT), "w", force_zip64=True) as inner:
                for part in parts:
                    inner.write(part)


def npz_bytes(entries: Mapping[str, Tensor | str]) -> bytes:
    """Return an archive of numpy's arrays, of texts and of tensors of float32, float64 or int64."""
    held = io.BytesIO()
    write_zip(held, ((f"{name}.npy", [_npy(entry)]) for name, entry in entries.items()))
    return held.getvalue()


def save_with_torch(value: Mapping[str, Any], file: Sink) -> None:
    """Write tensors, numbers, texts, lists and dictionaries so that ``torch.load`` reads them with `weights_only`."""
    torch.save(value, cast("IO[bytes]", file))


def _npy(entry: Tensor | str) -> bytes:
    """An array in version 1.0 of numpy's format: a header of a multiple of 64 bytes, then the numbers row by row."""
    if isinstance(entry, str):
        described, shape, data = f"<U{len(entry)}", "()", entry.encode("utf-32-le")
    else:
        described, data = _NPY[entry.dtype], b"".join(tensor_bytes(entry))
        shape = repr(tuple(entry.shape))
    header = f"{{'descr': '{described}', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


_LOSSES = {"classification": "cross_entropy", "regression": "mse"}


class KronfluenceFile(ExportedFile):
    """The folder of kronfluence's covariances, one tensor for each module in each of its four files."""

    format = "kronfluence"
    media_type = "application/zip"
    convention = (
        "sums, not means: activation_covariance is the sum of a·aᵀ, gradient_covariance that of g·gᵀ, g the gradient "
        "of the summed loss, with the bias as the last column of a; both counts are those of the positions."
    )
    _sides = ("activation_covariance", "gradient_covariance")

    @override
    def why_not(self, facts: LayerFacts) -> str | None:
        window = self.own_window(facts)
        if window is not None and _orientation(window, facts) != "natural":
            return "holds its weight as the transpose of a linear layer's, which kronfluence does not track"
        if facts.frozen_bias:
            return "adds a bias that is not trained, which kronfluence counts as a column of the inputs"
        return (
            activation_refusal(facts)
            or self.module_refusal(facts)
            or count_refusal(facts)
            or gradient_refusal(self.whole, facts)
        )

    @override
    def tensors_of(self, facts: LayerFacts, factors: Factors) -> tuple[dict[str, Tensor], dict[str, float | None]]:
        if facts.sums is None:
            raise ValueError(f"layer {facts.name} has no counts")
        module = self.module_of(facts)
        counted = torch.tensor([round(facts.sums.weight_A)])
        tensors = {
            f"activation_covariance/{module}": factors.widened_A * facts.sums.weight_A,
            f"gradient_covariance/{module}": dense_gradient(factors) * facts.sums.weight_G,
            **{f"num_{side}_processed/{module}": counted.clone() for side in self._sides},
        }
        return tensors, {}

    @override
    def bytes_of(self, facts: LayerFacts) -> int:
        return (facts.in_dim**2 + facts.out_dim**2) * item_bytes(self.whole)

    @override
    def write(self, file: Sink) -> None:
        metadata = self.metadata()
        arguments = {"strategy": "ekfac", "use_empirical_fisher": self.whole.collection.fisher == "empirical"}

        def members() -> Iterator[tuple[str, Iterable[bytes]]]:
            yield "factor_arguments.json", [json.dumps(arguments, sort_keys=True).encode()]
            for name in (*self._sides, *(f"num_{side}_processed" for side in self._sides)):
                own = {
                    key.removeprefix(f"{name}/"): each
                    for key, each in self.tensors.items()
                    if key.startswith(f"{name}/")
                }
                yield f"{name}.safetensors", tensor_file_parts(own, metadata)

        write_zip(file, members())


class LaplaceFile(ExportedFile):
    """The state of a `KronLaplace` but for `mean` and `loss`, which are the model's and the data's."""

    format = "laplace"
    media_type = "application/octet-stream"
    convention = (
        "H lists, for each trainable parameter in the order of the model, its Kronecker factors: of the sum over all "
        "examples, not the mean. A weight has G and A without the bias's row and column, a bias has G, since "
        "laplace-torch has no joint block of both; what is cut off is cut_share of the layer. The keys mean and loss "
        "are missing: they are parameters_to_vector(model.parameters()) and the summed loss."
    )

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 - those of ExportedFile
        self._owners: dict[str, tuple[LayerFacts, Window]] = {}
        super().__init__(*arguments)
        self._require_parameters()
        self._require_loss()
        self._outputs = self._number_of_outputs()

    @override
    def why_not(self, facts: LayerFacts) -> str | None:
        for parameter in facts.parameters:
            window = self.own_window(facts, parameter)
            if window is None:
                return (
                    f"is a part of `{parameter}`, or shares it with another layer, and the format has one entry for it"
                )
            if window.width > 1 and facts.form != "block" and _orientation(window, facts) is None:
                return f"holds `{parameter}` in another order than that of a matrix or its transpose"
            self._owners[parameter] = (facts, window)
        return count_refusal(facts) or gradient_refusal(self.whole, facts)

    @override
    def tensors_of(self, facts: LayerFacts, factors: Factors) -> tuple[dict[str, Tensor], dict[str, float | None]]:
        if facts.sums is None:
            raise ValueError(f"layer {facts.name} has no counts")
        scale = facts.sums.weight_G
        if self.params.likelihood == "regression":
            # `mse` is the mean over outputs without ½, and laplace-torch takes half the sum; squared gradients twice
            half = self._outputs / 2
            scale *= half**2 if self.whole.collection.fisher == "empirical" else half
        gradient = dense_gradient(factors) * scale
        if facts.form == "block":
            return self._blocks(facts, gradient)
        activation = factors.widened_A
        tensors: dict[str, Tensor] = {}
        cut = None
        for parameter in facts.parameters:
            window = self._owners[parameter][1]
            if window.width == 1 and facts.bias and window.left == facts.in_dim - 1:
                tensors[f"{parameter}/0"] = gradient * float(activation[-1, -1])
                continue
            kept, cut = without_bias(facts, activation) if activation.ndim == 2 else (activation, None)
            pair = [gradient, kept] if _orientation(window, facts) == "natural" else [kept, gradient]
            tensors |= {f"{parameter}/{place}": each for place, each in enumerate(pair)}
        return tensors, {"cut_share": cut}

    def _blocks(self, facts: LayerFacts, block: Tensor) -> tuple[dict[str, Tensor], dict[str, float | None]]:
        """Cut a block of several parameters into one for each."""
        tensors: dict[str, Tensor] = {}
        rest = block.clone()
        for parameter in facts.parameters:
            window = self._owners[parameter][1]
            rows = slice(window.top, window.top + window.height)
            tensors[f"{parameter}/0"] = block[rows, rows].contiguous()
            rest[rows, rows] = 0
        whole = float(torch.linalg.vector_norm(block))
        cut = float(torch.linalg.vector_norm(rest))
        return tensors, {"cut_share": cut / whole if len(tensors) > 1 and whole > 0 else None}

    @override
    def bytes_of(self, facts: LayerFacts) -> int:
        of_A = facts.in_dim if facts.form == "diagonal" else facts.in_dim**2
        return (of_A + facts.out_dim**2 * (1 + facts.bias)) * item_bytes(self.whole)

    @override
    def write(self, file: Sink) -> None:
        order = [each.name for each in self.whole.parameters or ()]
        factors = [[self.tensors[key] for key in (f"{name}/0", f"{name}/1") if key in self.tensors] for name in order]
        state = {
            "H": factors,
            "prior_mean": 0.0,
            "prior_precision": torch.ones(1),
            "sigma_noise": torch.ones(1),
            "n_data": self.whole.examples,
            "n_outputs": self._outputs,
            "likelihood": self.params.likelihood,
            "temperature": 1.0,
            "enable_backprop": False,
            "cls_name": "KronLaplace",
            "parameters": order,
            "kronoscope": self.metadata(),
        }
        save_with_torch(state, file)

    def _require_loss(self) -> None:
        """Refuse a likelihood that is not that of the loss which the factors were collected with."""
        expected = _LOSSES[self.params.likelihood or "classification"]
        if self.whole.loss not in (None, expected):
            raise ExportRefused(
                f"`likelihood` is `{self.params.likelihood}`, whose loss is `{expected}`, and the factors are those of "
                f"`{self.whole.loss}`; laplace-torch has `classification` for `cross_entropy`, `regression` for `mse`",
                pointer="/export/likelihood",
            )

    def _number_of_outputs(self) -> int:
        """Return the number of outputs that was given, or that the factors show; refuse one that they contradict."""
        known, given = known_outputs(self.whole), self.params.outputs
        if given is None and known is None:
            raise ExportRefused(
                "`outputs` is missing, and these factors do not show it; `laplace` needs the number of the model's "
                "outputs",
                pointer="/export/outputs",
            )
        if known is not None and given not in (None, known):
            raise ExportRefused(
                f"`outputs` is {given}, and the model has {known}: its head, layer `{self.whole.layers[-1].name}`, has "
                f"a G of {known}×{known}; give {known}, or leave `outputs` out",
                layer=self.whole.layers[-1].name,
                pointer="/export/outputs",
            )
        return given or known or 1

    def _require_parameters(self) -> None:
        if self.whole.parameters is None:
            raise ExportRefused("these factors are of an earlier version, which did not record the order of the "
                                "parameters; collect them anew", pointer="/factors")  # fmt: skip
        missing = [each.name for each in self.whole.parameters if each.name not in self._owners]
        if missing:
            named = ", ".join(f"`{name}`" for name in missing[:8])
            raise ExportRefused(
                f"laplace-torch takes a block for every trainable parameter, and {len(missing)} have none here, or are "
                f"left out: {named}; set `requires_grad` to False for them before collecting, and in laplace-torch",
                pointer="/export/without",
            )


def _orientation(window: Window, facts: LayerFacts) -> Literal["natural", "transposed"] | None:
    """Whether a parameter's numbers are the layer's matrix row by row, or that of its transpose; None for neither."""
    joined: list[tuple[int, int]] = []
    for size, stride in zip(window.shape, window.strides, strict=True):
        if size > 1 and joined and joined[-1][1] == size * stride:
            # neighbours that follow each other are one dimension
            joined[-1] = (joined[-1][0] * size, stride)
        elif size > 1:
            joined.append((size, stride))
    if joined in ([], [(window.height * window.width, 1)]):
        return "natural"
    return "transposed" if joined == [(facts.out_dim, 1), (window.width, facts.out_dim)] else None
