"""Seconds jobs: thirty job documents whose duration spreads from a tenth of a second to a minute, and their models."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

CLASSES = 10
_HERE = "benchmarks.cases.seconds_jobs"


def mlp(inputs: int, width: int, depth: int) -> nn.Module:
    """Return a perceptron with ``depth`` hidden layers."""
    torch.manual_seed(0)
    sizes = [inputs, *[width] * depth]
    hidden = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def cnn(channels: int, width: int, depth: int) -> nn.Module:
    """Return ``depth`` convolutions of 3 × 3, each with a normalisation."""
    torch.manual_seed(0)
    sizes = [channels, *[width] * depth]
    blocks = [
        part
        for entering, leaving in itertools.pairwise(sizes)
        for part in (nn.Conv2d(entering, leaving, 3, padding=1), nn.BatchNorm2d(leaving), nn.ReLU())
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


class _Last(nn.Module):
    """An LSTM whose last state is classified."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(inputs, width, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the logits of the last step."""
        last: Tensor = self.head(self.recurrent(sequence)[0][:, -1])
        return last


def lstm(inputs: int, width: int) -> nn.Module:
    """Return an LSTM with a classifier."""
    torch.manual_seed(0)
    return _Last(inputs, width)


class _Logits(nn.Module):
    """A classifier of ``transformers`` that takes token ids and returns logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.model(input_ids=ids + 1).logits
        return logits


def transformer(model_type: str, width: int, depth: int) -> nn.Module:
    """Return a small classifier of a type of ``transformers``."""
    torch.manual_seed(0)
    sizes = (
        {"n_embd": width, "n_layer": depth, "n_head": 4}
        if model_type == "gpt2"
        else {
            "hidden_size": width,
            "num_hidden_layers": depth,
            "num_attention_heads": 4,
            "intermediate_size": 2 * width,
        }
    )
    tokens = {"vocab_size": 501, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = AutoConfig.for_model(model_type, num_labels=CLASSES, **tokens, **sizes)
    return _Logits(AutoModelForSequenceClassification.from_config(config))


def documents() -> list[dict[str, Any]]:
    """Return the job documents, the short ones first."""
    found = []

    def add(
        model: str,
        shape: list[int],
        examples: int,
        batch: int,
        kind: str = "capacity",
        **options: Any,  # noqa: ANN401
    ) -> None:
        name, _, arguments = model.partition(" ")
        sizes = [int(each) if each.isdecimal() else each for each in arguments.split()]
        names = {
            "mlp": ("inputs", "width", "depth"),
            "cnn": ("channels", "width", "depth"),
            "lstm": ("inputs", "width"),
            "transformer": ("model_type", "width", "depth"),
        }[name]
        source = {"source": "factory", "factory": f"{_HERE}:{name}", "kwargs": dict(zip(names, sizes, strict=True))}
        ids = {"vocabulary": 500} if name == "transformer" else {}
        data = {"source": "synthetic", "shape": shape, "examples": examples, "classes": CLASSES} | ids
        collection = {"batch_size": batch, **options}
        found.append({
            "kind": kind, "model": source, "data": data, "task": {"type": "classification"}, "collection": collection,
            "cache": "off", "labels": {"case": f"{model} {kind}"},
        })  # fmt: skip

    add("mlp 6 8 1", [6], 64, 16)
    add("mlp 20 64 3", [20], 256, 64)
    add("mlp 20 64 3", [20], 512, 64, kind="spectrum")
    add("cnn 1 16 2", [1, 8, 8], 256, 64)
    add("mlp 100 256 3", [100], 512, 64, kind="reconstruction")
    add("mlp 64 128 2", [64], 1000, 64, fisher="empirical")
    add("mlp 20 64 3", [20], 2000, 64)
    add("cnn 1 16 2", [1, 8, 8], 1000, 64, kind="natural_gradient")
    add("lstm 16 32", [20, 16], 256, 32)
    add("mlp 64 128 2", [64], 2000, 64, fisher="type2")
    add("transformer bert 64 2", [32], 64, 16)
    add("cnn 1 16 2", [1, 8, 8], 1797, 128, ekfac=True)
    add("mlp 256 256 4", [256], 4000, 128)
    add("transformer bert 64 4", [32], 128, 16)
    add("transformer gpt2 64 4", [32], 128, 16)
    add("mlp 100 256 40", [100], 1000, 128)
    add("lstm 64 128", [50, 64], 512, 32)
    add("cnn 3 32 3", [3, 32, 32], 256, 32)
    add("transformer llama 128 6", [32], 128, 16)
    add("mlp 512 1024 3", [512], 6000, 256)
    add("cnn 3 64 6", [3, 16, 16], 512, 64)
    add("transformer bert 128 6", [64], 256, 16)
    add("mlp 20 64 3", [20], 60000, 64)
    add("mlp 2048 2048 3", [2048], 4000, 256)
    add("transformer gpt2 128 6", [64], 512, 16)
    add("cnn 3 64 6", [3, 64, 64], 48, 8)
    add("transformer llama 256 8", [64], 256, 16)
    add("cnn 3 32 4", [3, 64, 64], 400, 16)
    add("transformer bert 256 12", [64], 256, 16)
    add("cnn 3 64 8", [3, 32, 32], 1200, 32)
    return found
