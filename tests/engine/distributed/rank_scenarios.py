"""Collections that several ranks make together: one for each form that statistics take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kronoscope.local import LayerFactors, Measurement, measure

EXAMPLES = 44
BATCH = 8


class TinyDecoder(nn.Module):
    """An embedding, one attention whose q, k and v share their input, and a head that may hold the table's weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 6)
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 60, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        scores = self.q(x) @ self.k(x).mT
        x = self.norm(x + torch.softmax(scores, -1) @ self.v(x))
        return self.head(x * self.scale)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 5))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(36, 5)
    )


@dataclass(frozen=True)
class Scenario:
    """One model with its data and options."""

    make: Any
    inputs: tuple[int, ...] = (6,)
    ids: bool = False
    collection: Mapping[str, Any] = field(default_factory=dict)
    woodbury: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-12

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.collection.get("dtype") == "float32" else torch.float64

    @property
    def modes(self) -> tuple[str, ...]:
        """Reductions that keep the same numbers: rows that are rounded to 16 bits are another G than their sum."""
        if "policy" not in self.woodbury:
            return ("auto",)
        return ("gram", "gather") if "dtype" in self.woodbury else ("gram", "gather", "dense")

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().to(self.dtype)

    def batches(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Six batches, the last one of four examples; of a decoder, with ignored targets."""
        generator = torch.Generator().manual_seed(1)
        if self.ids:
            x = torch.randint(0, 60, (EXAMPLES, 3), generator=generator)
            y = torch.randint(0, 60, (EXAMPLES, 3), generator=generator)
            y[::5, 0] = -100
        else:
            x = torch.randn(EXAMPLES, *self.inputs, generator=generator, dtype=torch.float64).to(self.dtype)
            y = torch.randint(0, 5, (EXAMPLES,), generator=generator)
        index = torch.arange(EXAMPLES)
        return [(x[i : i + BATCH], y[i : i + BATCH], index[i : i + BATCH]) for i in range(0, EXAMPLES, BATCH)]

    def measured(self, batches: list[Any], **options: Any) -> Measurement:
        return measure(
            self.model(),
            batches,
            task="causal_lm" if self.ids else "classification",
            kinds=("factors",),
            collection={"batch_size": BATCH, "dtype": "float64", **self.collection, **options},
            woodbury=dict(self.woodbury),
        )


ALL_ROWS = {"policy": "all"}
UNCHECKED = {"self_check": "off"}
SCENARIOS = {
    "mc": Scenario(perceptron, collection={"batch_variance": True, "samples": 2}),
    "rows": Scenario(perceptron, collection=UNCHECKED, woodbury=ALL_ROWS),
    "type2 update_freq": Scenario(perceptron, collection={"fisher": "type2", "update_freq": 2, **UNCHECKED}),
    "empirical ema": Scenario(perceptron, collection={"fisher": "empirical", "ema_decay": 0.8, **UNCHECKED}),
    "ema update_freq rows": Scenario(
        perceptron, collection={"ema_decay": 0.8, "update_freq": 4, **UNCHECKED}, woodbury=ALL_ROWS
    ),
    "forward_only": Scenario(perceptron, collection={"fisher": "forward_only", **UNCHECKED}),
    "ekfac": Scenario(perceptron, collection={"ekfac": True, **UNCHECKED}),
    "float32": Scenario(perceptron, collection={"dtype": "float32", **UNCHECKED}, woodbury=ALL_ROWS, tolerance=1e-6),
    "half rows": Scenario(
        perceptron, collection=UNCHECKED, woodbury={"policy": "all", "dtype": "fp16"}, tolerance=1e-6
    ),
    "convolutions": Scenario(convolutions, inputs=(2, 5, 5), collection={"sharing": "reduce", **UNCHECKED}),
    "decoder": Scenario(lambda: TinyDecoder(tied=False), ids=True, collection={"batch_variance": True}),
    "decoder rows": Scenario(
        lambda: TinyDecoder(tied=False),
        ids=True,
        collection=UNCHECKED,
        woodbury={"policy": "all", "dtype": "bf16"},
        tolerance=1e-6,
    ),
    "tied decoder": Scenario(lambda: TinyDecoder(tied=True), ids=True, collection={"update_freq": 3, **UNCHECKED}),
}


def block(layer: LayerFactors) -> Tensor:
    """Return EK-FAC's block of a layer times a fixed matrix: the same whatever the signs of the eigenvectors."""
    A, G, values = layer.eigenvectors_A, layer.eigenvectors_G, layer.corrected_eigenvalues
    any_matrix = torch.cos(torch.arange(values.numel(), dtype=values.dtype)).view_as(values)
    # a diagonal factor has no eigenvectors but those of the identity
    inside = any_matrix if G is None else G.T @ any_matrix
    inside = (inside if A is None else inside @ A) * values
    outside = inside if G is None else G @ inside
    return outside if A is None else outside @ A.T


def outcome(found: Measurement) -> dict[str, Any]:
    """Return the factors, dense, and the facts of a measurement, as plain values."""
    layers = {row.layer: row for row in found.layers if row.status != "declared"}
    corrected = {name: block(found.factors[name]) for name in layers} if found.index["collection"]["ekfac"] else {}
    factors = {name: (found.factors[name].A.clone(), found.factors[name].G.clone()) for name in layers}
    records = {}
    for name, row in layers.items():
        record = row.record
        records[name] = {
            "exact_trace": record.exact_trace,
            "trace_standard_error": record.trace_standard_error,
            "relative_variance_A": record.relative_variance_A,
            "relative_variance_G": record.relative_variance_G,
            "relative_standard_error_G": record.relative_standard_error_G,
            "positions": record.positions,
            "terms": record.terms,
            "update_index": record.update_index,
        }
    entries = {entry["name"]: entry for entry in found.index["layers"]}
    digests = {
        name: (entries[name]["activation_covariance"]["sha256"], entries[name]["gradient_covariance"]["sha256"])
        for name in layers
    }
    return {
        "factors": factors,
        "corrected": corrected,
        "records": records,
        "digests": digests,
        "declared": sorted(row.layer for row in found.layers if row.status == "declared"),
        "examples": found.summary["factors"].examples,
        "ranks": {
            name: (row.record.world_size, row.record.reduction, row.record.positions_local)
            for name, row in layers.items()
        },
        "sent": {name: row.record.sent_bytes for name, row in layers.items()},
    }
