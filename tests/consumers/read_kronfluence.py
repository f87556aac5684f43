"""kronfluence reads the exported folder, and its sums are those of a run of its own."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments
from kronfluence.factor.covariance import load_covariance_matrices
from kronfluence.task import Task
from torch import Tensor, nn

sys.path.insert(0, sys.argv[2])
from nets import examples, net


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
