"""The two models of the influence benchmark with their examples and queries; built alike in every process.

    python -m benchmarks.cases.influence LIBRARY CASE OUTPUT

runs one library on one of them, and stores its scores and seconds.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import collection

QUERIES, DAMPING = 64, 1e-3
BATCH = {"digits": 100, "minilm": 16}
PARAGRAPHS, TOKENS = 128, 64


class Topics(nn.Module):
    """MiniLM's mean embedding, and a linear layer of ten classes."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(384, 10)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (N, 10)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))


def perceptron() -> nn.Module:
    """The net of the digits."""
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))


def case(name: str, folder: Path) -> tuple[nn.Module, list[str], list[tuple[Any, Tensor]], list[tuple[Any, Tensor]]]:
    """The model, its layers, and the batches of the training examples and the queries."""
    torch.manual_seed(0)
    if name == "digits":
        model = perceptron()
        given = torch.load(folder / "digits.pt")
        model.load_state_dict(given["state"])
        images, labels = given["images"], given["labels"]
        train, query = torch.arange(2000) % len(images), torch.arange(QUERIES) * 7
        data, asked = (list(zip(images[which].split(BATCH[name]), labels[which].split(BATCH[name]), strict=True))
                       for which in (train, query))  # fmt: skip
    else:
        (problem, _), count = collection.encoder(), PARAGRAPHS
        model = Topics(problem.model)
        inputs, _ = collection._paragraphs(0, count + QUERIES, problem.model)  # noqa: SLF001 - of this package
        cut = {key: each[:, :TOKENS].split(BATCH[name]) for key, each in inputs.items()}
        labels = torch.randint(10, (count + QUERIES,)).split(BATCH[name])
        texts = [({key: each[place] for key, each in cut.items()}, own) for place, own in enumerate(labels)]
        data, asked = texts[: count // BATCH[name]], texts[count // BATCH[name] :]
    layers = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    trained = {id(parameter) for path, module in model.named_modules() if path in layers
               for parameter in module.parameters()}  # fmt: skip
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    return model.eval(), layers, data, asked


def main(library: str, name: str, output: Path) -> None:
    """Store the scores of one library, on one thread."""
    torch.set_num_threads(1)
    adapter = importlib.import_module(f"benchmarks.conformance.adapters.{library}_influence")
    scores, seconds = adapter.influence(name, output.parent)
    torch.save({"scores": scores, "seconds": seconds}, output)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
