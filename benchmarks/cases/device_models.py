"""Device models: the networks of the device benchmark with their batches, on the GPU, or small on the CPU.

Each is made from its shape with random weights, so that nothing is downloaded. Layers that no peer knows (embeddings,
norms) are frozen, and so is a language model's head where a case leaves it out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)
from transformers.pytorch_utils import Conv1D

from benchmarks.conformance.problem import Problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = DEVICE.type == "cpu"
BATCHES, FEW = (2, 2) if SMALL else (8, 4)
"""Batches of a job, and of one whose batches are large or whose layers are many."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on the device, and the batches that are collected."""

    name: str
    model: nn.Module
    task: str
    data: list[tuple[Any, Tensor]]
    layers: tuple[str, ...] = ()
    """Linear and convolutional layers that are measured, for a peer."""

    @property
    def batch_size(self) -> int:
        """Examples of a batch."""
        return len(self.data[0][1])

    @property
    def problem(self) -> Problem:
        """The same in a peer's terms, with the labels of the data."""
        decoder = self.task == "causal_lm"
        return Problem(
            name=self.name,
            model=self.model,
            layers=self.layers,
            task="causal_lm" if decoder else "classification",
            examples=self.batch_size,
            terms=self.data[0][1].shape[-1] - 1 if decoder else 1,
            fisher="empirical",
        )

    def loss(self, batch: tuple[Any, Tensor]) -> Tensor:
        """Return the mean loss of one batch by plain PyTorch."""
        inputs, targets = batch
        problem = self.problem
        return functional.cross_entropy(problem.outputs(self.model, inputs), problem.labels(targets))


def gpt2(*, head: bool) -> Case:
    """Return GPT-2 small with ``nn.Linear`` in place of ``Conv1D``, which the peers do not know."""
    wide = {"n_layer": 1, "n_embd": 64, "n_head": 4} if SMALL else {"n_layer": 12, "n_embd": 768, "n_head": 12}
    vocabulary = 256 if SMALL else 50257
    model = GPT2LMHeadModel(
        GPT2Config(**wide, n_positions=512, vocab_size=vocabulary, tie_word_embeddings=False, use_cache=False)
    )
    for module in list(model.modules()):
        for place, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                linear = nn.Linear(*child.weight.shape)
                linear.weight.data.copy_(child.weight.detach().T)
                linear.bias.data.copy_(child.bias.detach())
                setattr(module, place, linear)
    name = f"GPT-2 {'with' if head else 'without'} head"
    return _decoder(name, model, _tokens(BATCHES, 8, 512, vocabulary), head=head)


def perceptron() -> Case:
    """Return three layers, 784-1024-1024-10, with batches of 256."""
    wide, size = (32, 16) if SMALL else (1024, 256)
    model = nn.Sequential(nn.Linear(784, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 10))
    return _case("MLP", model, "classification", _labelled(torch.randn(BATCHES, size, 784), 10))


def resnet() -> Case:
    """Return ResNet-50 with batches of 32 images of 224×224."""
    small = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 10}
    model = ResNetForImageClassification(ResNetConfig(**(small if SMALL else {"num_labels": 1000})))
    images = torch.randn(FEW, *((2, 3, 32, 32) if SMALL else (32, 3, 224, 224)))
    return _case("ResNet-50", model, "classification", _labelled(images, 10 if SMALL else 1000))


class Recurrent(nn.Module):
    """Two layers of an LSTM, and a classifier of its last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, steps: Tensor) -> Tensor:
        """Return logits, shape (N, 10), of steps, shape (N, T, width)."""
        logits: Tensor = self.head(self.lstm(steps)[0][:, -1])
        return logits


def recurrent() -> Case:
    """Return an LSTM of two layers of 512 with batches of 32 sequences of 128 steps."""
    count, steps, width = (2, 8, 16) if SMALL else (32, 128, 512)
    model = Recurrent(width).to(DEVICE).eval()
    data = _labelled(torch.randn(FEW, count, steps, width), 10)
    return Case(name="LSTM", model=model, task="classification", data=data)


def mixture() -> Case:
    """Return a Mixtral of four layers of eight experts without its head; its experts are measured too."""
    config = MixtralConfig(
        vocab_size=64 if SMALL else 8192,
        hidden_size=32 if SMALL else 512,
        intermediate_size=48 if SMALL else 1024,
        num_hidden_layers=1 if SMALL else 4,
        num_attention_heads=4 if SMALL else 8,
        num_key_value_heads=2 if SMALL else 4,
        num_local_experts=2 if SMALL else 8,
        max_position_embeddings=512,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model = MixtralForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "lm_head" not in name and parameter.ndim > 1)
    data = _tokens(FEW, 8, 512, config.vocab_size)
    return Case(name="mixture of experts", model=model.to(DEVICE).eval(), task="causal_lm", data=data)


def llama() -> Case:
    """Return 150 million parameters in the shapes of Llama, bf16, without the head."""
    return _llama("Llama shapes, bf16", layers=10, hidden=1024, inner=2816, heads=16, vocabulary=16000, tokens=512)


def llama_1b(layers: int) -> Case:
    """Return Llama-1B's shapes in bf16, without the head, cut to so many layers."""
    return _llama("Llama-1B", layers=layers, hidden=2048, inner=8192, heads=32, vocabulary=128256, tokens=1024)


def _llama(name: str, *, layers: int, hidden: int, inner: int, heads: int, vocabulary: int, tokens: int) -> Case:
    config = LlamaConfig(
        vocab_size=64 if SMALL else vocabulary,
        hidden_size=32 if SMALL else hidden,
        intermediate_size=48 if SMALL else inner,
        num_hidden_layers=1 if SMALL else layers,
        num_attention_heads=4 if SMALL else heads,
        num_key_value_heads=2 if SMALL else 8,
        max_position_embeddings=tokens,
        use_cache=False,
        tie_word_embeddings=False,
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(usual)
    return _decoder(name, model, _tokens(FEW, 4, tokens, config.vocab_size), head=False)


def minilm() -> Case:
    """Return MiniLM's shape with a classifier, and batches of 64 sequences of 128."""
    config = BertConfig(
        vocab_size=64 if SMALL else 30522,
        hidden_size=32 if SMALL else 384,
        num_hidden_layers=1 if SMALL else 6,
        num_attention_heads=4 if SMALL else 12,
        intermediate_size=64 if SMALL else 1536,
        num_labels=10,
    )
    texts = _tokens(BATCHES, 64, 128, config.vocab_size)
    data = [(inputs, torch.randint(10, (len(ids),), device=DEVICE)) for inputs, ids in texts]
    return _case("MiniLM", BertForSequenceClassification(config), "sequence_classification", data)


PLANNED: Mapping[str, Callable[[], Case]] = {
    "ResNet-50": resnet,
    "Llama shapes, bf16": llama,
    "mixture of experts": mixture,
    "LSTM": recurrent,
}
"""Models whose plan is held against what was measured, beside GPT-2 without and with its head."""


def _decoder(name: str, model: nn.Module, data: list[tuple[Any, Tensor]], *, head: bool) -> Case:
    return _case(name, model, "causal_lm", data, besides=() if head else ("lm_head",))


def _case(name: str, model: nn.Module, task: str, data: list[tuple[Any, Tensor]], besides: Sequence[str] = ()) -> Case:
    """Freeze a model but for its linear and convolutional layers."""
    model.requires_grad_(requires_grad=False)
    layers = []
    for place, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and place not in besides:
            module.requires_grad_(requires_grad=True)
            layers.append(place)
    return Case(name=name, model=model.to(DEVICE).eval(), task=task, data=data, layers=tuple(layers))


def _tokens(batches: int, size: int, length: int, vocabulary: int) -> list[tuple[Any, Tensor]]:
    """Batches of sequences without padding, which a mask says."""
    shape = (2, 16) if SMALL else (size, length)
    ids = torch.randint(0, vocabulary, (batches, *shape)).to(DEVICE)
    return [({"input_ids": each, "attention_mask": torch.ones_like(each)}, each) for each in ids]


def _labelled(inputs: Tensor, classes: int) -> list[tuple[Any, Tensor]]:
    """Each batch of inputs with drawn labels."""
    labels = torch.randint(classes, inputs.shape[:2])
    return list(zip(inputs.to(DEVICE), labels.to(DEVICE), strict=True))
