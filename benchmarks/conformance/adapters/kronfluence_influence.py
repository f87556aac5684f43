"""kronfluence's influence: EK-FAC scores by its own analyzer."""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cases.influence import BATCH, DAMPING, QUERIES, case


class _Batches(torch.utils.data.Dataset[Any]):
    """Single examples of batches."""

    def __init__(self, batches: list[tuple[Any, Tensor]]) -> None:
        self.examples = [
            ({key: part[place] for key, part in inputs.items()} if isinstance(inputs, dict) else inputs[place],
             targets[place])
            for inputs, targets in batches for place in range(len(targets))
        ]  # fmt: skip

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: int) -> Any:  # noqa: ANN401 - inputs and a target
        return self.examples[place]


def influence(name: str, folder: Path) -> tuple[Tensor, float]:
    """The same of kronfluence, by its own analyzer."""
    model, layers, data, asked = case(name, folder)

    class Classification(Task):
        """Summed cross-entropy of the wanted layers."""

        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:  # noqa: ANN401, ARG002
            """At the data's labels."""
            inputs, targets = batch
            outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            return functional.cross_entropy(outputs, targets, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:  # noqa: ANN401
            """The same loss."""
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str]:
            """All linear layers."""
            return layers

        def get_attention_mask(self, batch: Any) -> Tensor | None:  # noqa: ANN401
            """The mask of texts."""
            inputs, _ = batch
            return inputs["attention_mask"] if isinstance(inputs, dict) else None

    task, size = Classification(), BATCH[name]
    model = prepare_model(model, task)
    with tempfile.TemporaryDirectory() as written:
        analyzer = Analyzer("influence", model, task, cpu=True, output_dir=written, disable_tqdm=True)
        train, query = _Batches(data), _Batches(asked)
        begun = time.perf_counter()
        analyzer.fit_all_factors(
            "factors", train, per_device_batch_size=size,
            factor_args=FactorArguments(strategy="ekfac", use_empirical_fisher=True),
        )  # fmt: skip
        analyzer.compute_pairwise_scores(
            "scores", "factors", query, train, per_device_query_batch_size=QUERIES,
            per_device_train_batch_size=size, score_args=ScoreArguments(damping_factor=DAMPING),
        )  # fmt: skip
        found = analyzer.load_pairwise_scores("scores")["all_modules"]
        return found, time.perf_counter() - begun
