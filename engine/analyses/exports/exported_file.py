"""A file of another tool: which layers it can hold, what it takes of each, and how it says what its numbers mean."""

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from catalog.analyses.export import EXPORT_FILES, ExportFormat, ExportMetrics, ExportParams, left_out
from catalog.record import FieldError
from engine.errors import BrokenFactors, BudgetExceeded, UsageError
from engine.factors.factor_set import GIVEN_MATRIX, FactorSet, LayerFacts
from engine.factors.kronecker_factors import Factors, digest
from engine.layers.parameter_slice import Window
from engine.layers.tied import NEAREST
from engine.memory.guard import Guard
from engine.memory.plan import readable_bytes
from engine.operators.parameter_space import ParameterSpace
from engine.tensor_file import Sink

_MOST_COUNT = 2.0**53
_NAMED = 8
"""Layers that a refusal names with their reasons; all are counted."""


class ExportRefused(UsageError):
    """The format cannot hold a layer, or these factors; the message says which and why."""

    code = "export_refused"


class ExportedFile(ABC):
    """One file in the making: layers are added one by one, then it is written.

    Args:
        whole: The factors.
        params: The format, and the layers to leave out.
        kappa_max: Largest condition number, for GPTQ.

    Raises:
        ExportRefused: If the format cannot hold a layer that is not to be left out, or a name fits no layer.

    Memory:
        All tensors of the file, until it is written.
    """

    format: ClassVar[ExportFormat]
    convention: ClassVar[str]
    """The meaning of the numbers, in words that go into the file."""
    media_type: ClassVar[str]

    def __init__(self, whole: FactorSet, params: ExportParams, kappa_max: float | None) -> None:
        self.whole = whole
        self.params = params
        self.kappa_max = kappa_max
        try:
            self.left_out = left_out(params.without, [facts.name for facts in whole.layers])
        except FieldError as error:
            raise ExportRefused(f"`{error.field}` {error.message}", pointer="/export/without") from error
        self.tensors: dict[str, Tensor] = {}
        """The contents, by the names that the tool knows them by."""
        self._layers: dict[str, Mapping[str, Any]] = {}
        self._numbers = {each.name: math.prod(each.shape) for each in whole.parameters or ()}
        self._uses = Counter(name for facts in whole.layers for name in facts.parameters)
        self._require_sound()
        self._require_layers()

    @property
    def name(self) -> str:
        """The name of the file."""
        return EXPORT_FILES[self.format]

    @property
    def exported(self) -> tuple[LayerFacts, ...]:
        """The layers that go into the file."""
        return tuple(facts for facts in self.whole.layers if facts.name not in self.left_out)

    @abstractmethod
    def why_not(self, facts: LayerFacts) -> str | None:
        """Return why the format cannot hold a layer, as the rest of a sentence about it; None where it can."""

    @abstractmethod
    def tensors_of(self, facts: LayerFacts, factors: Factors) -> tuple[dict[str, Tensor], dict[str, float | None]]:
        """Return what the file takes of a layer: tensors by name, and those of its metrics that this computes."""

    @abstractmethod
    def bytes_of(self, facts: LayerFacts) -> int:
        """Return the bytes of those tensors."""

    def work_bytes(self, facts: LayerFacts) -> int:
        """Return the bytes that are held beside the file while a layer's tensors are made."""
        return 3 * self.bytes_of(facts)

    @abstractmethod
    def write(self, file: Sink) -> None:
        """Write the file, once all layers are added."""

    def add(self, facts: LayerFacts, factors: Factors) -> ExportMetrics:
        """Add a layer, unless it is to be left out; return what the file holds of it.

        A is (in_dim, in_dim) or its diagonal, G too; any float dtype. ``ExportRefused`` if a number of it cannot be
        had.
        """
        count = facts.sums.weight_A if facts.sums is not None and facts.form == "kronecker" else None
        if facts.name in self.left_out:
            return ExportMetrics(entries=(), count=count, cut_share=None, damping=None, condition=None)
        tensors, numbers = self.tensors_of(facts, factors)
        for key, tensor in tensors.items():
            require_finite(facts, key, tensor)
        self.tensors |= tensors
        metrics = ExportMetrics(
            entries=tuple(tensors),
            count=count,
            cut_share=numbers.get("cut_share"),
            damping=numbers.get("damping"),
            condition=numbers.get("condition"),
        )
        self._layers[facts.name] = {
            "digest_A": digest(factors.A),
            "digest_G": digest(factors.G),
            "count": count,
            **{name: value for name, value in numbers.items() if value is not None},
        }
        return metrics

    def require_room(self, guard: Guard) -> None:
        """Raise ``BudgetExceeded``, before anything is read, if its tensors and those of one layer do not fit."""
        each = [self.bytes_of(facts) for facts in self.exported]
        needed = sum(each) + max(map(self.work_bytes, self.exported), default=0)
        if not guard.fits(host_bytes=needed):
            free = readable_bytes(guard.free_bytes("host"))
            raise BudgetExceeded(
                f"{self.name} takes {readable_bytes(needed)} of host memory while it is made, and {free} are free; "
                "give the job more (`memory.host`), or export fewer layers at a time (`export.without`)",
                pointer="/memory/host",
            )

    def metadata(self) -> dict[str, str]:
        """Return what the file says of itself: the convention, coverage, counts and digests, as JSON texts."""
        whole = self.whole
        covered = whole.covered_parameters
        said: dict[str, Any] = {
            "coverage": {
                "trainable_parameters": whole.trainable_parameters,
                "covered_parameters": covered,
                "not_covered": {layer.name: layer.reason for layer in whole.declared},
            },
            "left_out": sorted(self.left_out),
            "layers": self._layers,
            "examples": whole.examples,
            "fisher": whole.collection.fisher,
            "sharing": whole.collection.sharing,
            "model_sha256": None if whole.counted is None else whole.counted.model,
        }
        texts = {name: json.dumps(value, sort_keys=True, separators=(",", ":")) for name, value in said.items()}
        return {"format": f"kronoscope-export-{self.format}/1", "convention": self.convention, **texts}

    def own_window(self, facts: LayerFacts, parameter: str | None = None) -> Window | None:
        """Return the window in which a layer shows the whole of a parameter; None where it shows a part, or shares it.

        It is found by place and size, not by a name; no parameter stands for all of the matrix but the bias's column.
        """
        columns = facts.in_dim - facts.bias
        for window in facts.windows or ():
            weight = (window.top, window.left, window.height, window.width) == (0, 0, facts.out_dim, columns)
            if weight if parameter is None else window.parameter == parameter:
                whole = window.offset == 0 and window.last == self._numbers.get(window.parameter, 0) - 1
                alone = sum(each.parameter == window.parameter for each in facts.windows or ()) == 1
                return window if whole and alone and self._uses[window.parameter] == 1 else None
        return None

    def module_of(self, facts: LayerFacts) -> str | None:
        """Return the one module that holds a layer's whole weight; None where there are several, or none."""
        window = self.own_window(facts)
        module, _, name = ("", "", "") if window is None else window.parameter.rpartition(".")
        return module if name == "weight" and len(facts.holders) < 2 else None

    def module_refusal(self, facts: LayerFacts) -> str | None:
        """Return why a layer is not a module that its weight belongs to; None where it is one."""
        if len(facts.holders) > 1:
            held = ", ".join(f"`{name}`" for name in facts.holders[:4])
            return f"is the weight of {held}, and its A that of all their inputs together"
        if self.module_of(facts) is None:
            return "is not the whole weight of a module, and the format knows layers by the names of modules"
        return None

    def _require_sound(self) -> None:
        """Refuse a damaged index before its numbers are used."""
        space = None if self.whole.parameters is None else ParameterSpace.of(self.whole)
        names = Counter(facts.name for facts in self.whole.layers)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise BrokenFactors(f"two layers are named `{twice}`; collect the factors again", pointer="/factors")
        for facts in self.whole.layers:
            if space is not None and facts.windows is not None:
                space.require_windows(facts)

    def _require_layers(self) -> None:
        reasons = {facts.name: why for facts in self.exported if (why := self._reason(facts)) is not None}
        if reasons:
            named = "; ".join(f"`{name}` {why}" for name, why in [*reasons.items()][:_NAMED])
            more = f"; and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
            listed = ", ".join(json.dumps(name) for name in [*reasons][:_NAMED])
            raise ExportRefused(
                f"{self.format} cannot hold {len(reasons)} of {len(self.exported)} layers: {named}{more}. To export "
                f"the others, leave these out by name: `export.without: [{listed}{', …' if more else ''}]`",
                layer=next(iter(reasons)),
                pointer="/export/without",
            )
        if not self.exported:
            raise ExportRefused("the factors cover no layer, so that there is none to export; collect factors of a "
                                "model with layers that are covered", pointer="/factors")  # fmt: skip

    def _reason(self, facts: LayerFacts) -> str | None:
        if facts.module == GIVEN_MATRIX:
            return "is a matrix of your own, not a layer"
        return self.why_not(facts)


def activation_refusal(facts: LayerFacts) -> str | None:
    """Return why a layer has no second moment of its inputs, over all positions, as a matrix; None where it has one."""
    if facts.form == "diagonal":
        return "has its A as a diagonal alone (the counts of a table's entries)"
    if facts.form != "kronecker":
        return "has no A: its block is kept as it is"
    if facts.in_dim == facts.bias:
        return "has a bias alone that is trained, and no A of its inputs"
    if NEAREST in facts.why:
        return "is head and table in one, and its A belongs to the nearest product of both, not to its inputs"
    if facts.sharing == "reduce" and (facts.sums is None or facts.positions != facts.sums.rows_A):
        return (
            "was collected with `sharing: reduce`, which averages its inputs over positions; collect it with `expand`"
        )
    return None


def count_refusal(facts: LayerFacts) -> str | None:
    """Return why the sums of a layer cannot be had; None where its counts are known."""
    sums = facts.sums
    counts = [] if sums is None else [sums.weight_G, *([sums.weight_A] if facts.form == "kronecker" else [])]
    if not counts or not all(0 < each < _MOST_COUNT for each in counts):
        return "has no counts (a moving average, or factors of an earlier version), so that its sums are not known"
    return None


def gradient_refusal(whole: FactorSet, facts: LayerFacts) -> str | None:
    """Return why a layer has no G as a matrix; None where it has one."""
    if whole.collection.fisher == "forward_only":
        return "was collected with `fisher: forward_only`, which has no G"
    if facts.representation_G == "diagonal_sketch":
        return "has a G of which the diagonal or a sketch alone is kept"
    if facts.form == "diagonal_block":
        return "has the diagonal of its block alone"
    return None


def without_bias(facts: LayerFacts, activation: Tensor) -> tuple[Tensor, float | None]:
    """Cut the bias's row and column off A (in_dim, in_dim), float32 or float64.

    It returns A of the weights alone, contiguous, and the share of the norm that was cut off; None where nothing was.
    """
    if not facts.bias:
        return activation.contiguous(), None
    kept = activation[:-1, :-1].contiguous()
    whole = float(torch.linalg.vector_norm(activation, dtype=torch.float64))
    cut = 2 * float(activation[:-1, -1].double().square().sum()) + float(activation[-1, -1]) ** 2
    return kept, cut**0.5 / whole if whole > 0 else None


def require_finite(facts: LayerFacts, name: str, tensor: Tensor) -> None:
    """Refuse a tensor of a file that is not finite: ``ExportRefused`` names the layer and the tensor."""
    if not bool(torch.isfinite(tensor).all()):
        raise ExportRefused(
            f"layer `{facts.name}`: `{name}` holds NaN or Inf in the precision of the file; collect the factors anew, "
            "with `collection.dtype: float64` where their numbers are very large",
            layer=facts.name,
        )


def dense_gradient(factors: Factors) -> Tensor:
    """Return G (out_dim, out_dim) as a matrix; ``ExportRefused`` if what is kept is not G itself."""
    side = factors.side_G
    if side.approximate or not side.complete:
        raise ExportRefused(f"layer `{factors.layer}` has a G that is kept as `{side.kind}`, which is not G itself; "
                            "leave it out by `export.without`", layer=factors.layer)  # fmt: skip
    return factors.widened_G


def item_bytes(whole: FactorSet) -> int:
    """Return the bytes of a number of the file: those of the factors, at least four."""
    return 8 if whole.collection.dtype == "float64" else 4
