"""kronfluence reads the exported folder: its sums are those of a run of its own, and so are the scores of influence."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.factor.covariance import load_covariance_matrices
from kronfluence.task import Task
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, sys.argv[2])
from nets import DAMPING, QUERIES, examples, net


class Classification(Task):
    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        assert not sample
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum")

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)


def main() -> None:
    task = Classification()
    model = prepare_model(net(), task)
    data = torch.utils.data.TensorDataset(*examples())
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("own", model, task, output_dir=folder, disable_model_save=True, disable_tqdm=True, cpu=True)
        arguments = FactorArguments(strategy="ekfac", use_empirical_fisher=True)
        analyzer.fit_covariance_matrices(
            factors_name="own", dataset=data, factor_args=arguments, per_device_batch_size=32
        )
        own = analyzer.load_covariance_matrices(factors_name="own")
        analyzer.fit_all_factors(factors_name="all", dataset=data, factor_args=arguments, per_device_batch_size=32)
        analyzer.compute_pairwise_scores(
            "scores", "all", torch.utils.data.Subset(data, range(QUERIES)), data, per_device_query_batch_size=QUERIES,
            per_device_train_batch_size=32, score_args=ScoreArguments(damping_factor=DAMPING),
        )  # fmt: skip
        scores = analyzer.load_pairwise_scores("scores")["all_modules"]
    differs = (
        load_file(Path(sys.argv[1]) / "influence.safetensors")["scores"] + scores
    ).abs().max() / scores.abs().max()
    print(f"  EK-FAC influence differs by {float(differs):.2g} of the largest score")
    assert differs <= 1e-5
    ours = load_covariance_matrices(Path(sys.argv[1]) / "factors_mine")
    worst = 0.0
    assert own.keys() == ours.keys()
    for name, tensors in own.items():
        assert tensors.keys() == ours[name].keys(), (name, tensors.keys(), ours[name].keys())
        for module, tensor in tensors.items():
            other = ours[name][module]
            if tensor.dtype == torch.int64:
                assert torch.equal(tensor, other), (name, module, tensor, other)
            else:
                worst = max(worst, float((tensor - other).abs().max() / tensor.abs().max()))
    print(f"  sums differ by {worst:.2g} of the largest; counts are equal")
    assert worst <= 1e-5


main()
