"""Merge two checkpoints of one network by their inputs' second moments A (RegMean), and hold them against the mean.

    python examples/regmean.py

A merged linear layer is the least-squares fit to the outputs of both, each on its own data::

    W = (n₁ W₁ A₁ + n₂ W₂ A₂) (n₁ A₁ + n₂ A₂)⁻¹

See Jin et al. (2023), Dataless knowledge fusion by merging weights of language models.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from kronoscope.local import measure

Data = tuple[Tensor, Tensor]


@torch.no_grad()
def averaged(models: list[nn.Module]) -> nn.Module:
    """Return the mean of all parameters."""
    result = copy.deepcopy(models[0])
    for name, parameter in result.named_parameters():
        parameter.copy_(sum(each.get_parameter(name) for each in models) / len(models))
    return result


@torch.no_grad()
def merged(checkpoints: list[tuple[nn.Module, Data]]) -> nn.Module:
    """Return the mean, with every linear layer fitted to those of all checkpoints."""
    result = averaged([model for model, _ in checkpoints])
    collection = {"fisher": "forward_only", "dtype": "float64"}
    found = [measure(model, [data], task="classification", kinds="factors", collection=collection).factors
             for model, data in checkpoints]  # fmt: skip
    linear = [(name, each) for name, each in result.named_modules() if isinstance(each, nn.Linear)]
    for name, layer in linear:
        moments, products = [], []
        for (model, (inputs, _)), factors in zip(checkpoints, found, strict=True):
            parameters = [each.reshape(layer.out_features, -1) for each in model.get_submodule(name).parameters()]
            moments.append(len(inputs) * factors[name].A)
            products.append(torch.cat(parameters, 1).double() @ moments[-1])
        weights = torch.linalg.lstsq(sum(moments), sum(products).mT, driver="gelsd").solution.mT
        layer.weight.copy_(weights[:, : layer.in_features])
        if layer.bias is not None:
            layer.bias.copy_(weights[:, -1])
    return result


def train(model: nn.Module, data: Data, epochs: int) -> nn.Module:
    """Train a copy."""
    model = copy.deepcopy(model)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for inputs, targets in zip(*(each.split(64) for each in data), strict=True):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimiser.step()
    return model


def main() -> None:
    """Merge two networks that go on from one, each on the digits of its own kind."""
    torch.manual_seed(0)
    images, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    data = images / 16, labels
    first = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    first = train(first, (data[0][::3], data[1][::3]), 3)
    halves = [tuple(each[chosen] for each in data) for chosen in (labels < 5, labels >= 5)]
    parts = [(train(first, half, 30), half) for half in halves]
    models = [model for model, _ in parts]
    models += [averaged(models), merged(parts)]
    for said, model in zip(("digits 0 to 4", "digits 5 to 9", "mean", "RegMean"), models, strict=True):
        right = (model(data[0]).argmax(1) == data[1]).double().mean()
        print(f"{said:14} {100 * float(right):5.1f} % of all digits")


if __name__ == "__main__":
    main()
