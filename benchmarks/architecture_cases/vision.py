"""Models of images, sounds and other arrays: timm's, and those of transformers.

timm asks torchvision for its transforms as it is imported, and uses none of them to build or run a
model; torchvision has a build for few of torch's. A module object stands in for it during the import.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.architecture_cases.case import EXAMPLES, Builder, Case, enlivened, normal, tokens
from benchmarks.architecture_cases.language import SEQUENCE, SMALL, model_of

CLASSES = 4
_STANDS_IN = ("", ".transforms", ".transforms.functional", ".datasets", ".ops", ".ops.misc", ".models")


class _Names(type):
    """The type of a class whose attributes are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(types.ModuleType):
    """A package of which anything can be imported, and nothing works."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever is asked for
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Names(name, (), {})


@contextmanager
def _torchvision() -> Iterator[None]:
    """Stand in for torchvision, where it is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    names = [f"torchvision{name}" for name in _STANDS_IN]
    for name in names:
        module = _StandIn(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def timm(name: str, size: int = 32, **options: Any) -> Builder:  # noqa: ANN401 - a model's own
    """A classifier of timm for images of ``size``."""

    def build() -> Case:
        with _torchvision():
            package = importlib.import_module("timm")
        model = package.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        return _classified(model, normal(EXAMPLES, 3, size, size))

    return build


def built(module: str, kind: str, size: int = 32, options: Callable[[Any], dict[str, Any]] = lambda _: {}) -> Builder:
    """A class of timm with ``options``, which may take what they are made of from its module."""

    def build() -> Case:
        with _torchvision():
            source = importlib.import_module(f"timm.models.{module}")
        model = getattr(source, kind)(num_classes=CLASSES, **options(source))
        return _classified(model, normal(EXAMPLES, 3, size, size))

    return build


def _regnet(source: Any) -> dict[str, Any]:  # noqa: ANN401 - timm's module
    return {"cfg": source.RegNetCfg(depth=6, w0=8, wa=8.0, wm=2.0, group_size=8, stem_width=8, se_ratio=0.25)}


def _gernet(source: Any) -> dict[str, Any]:  # noqa: ANN401 - timm's module
    block = source.ByoBlockCfg
    blocks = (block(type="basic", d=1, c=8, s=2, gs=0, br=1.0), block(type="bottle", d=1, c=16, s=2, gs=1, br=2.0))
    return {"cfg": source.ByoModelCfg(blocks=blocks, stem_chs=8, stem_pool=None, num_features=24)}


def _coatnet(source: Any) -> dict[str, Any]:  # noqa: ANN401 - timm's module
    conv = source.MaxxVitConvCfg(expand_ratio=2.0)
    transformer = source.MaxxVitTransformerCfg(dim_head=8, rel_pos_type="bias", window_size=(1, 1))
    cfg = source.MaxxVitCfg(
        embed_dim=(8, 8, 16, 16), depths=(1, 1, 1, 1), stem_width=(8, 8), conv_cfg=conv, transformer_cfg=transformer
    )
    return {"cfg": cfg, "img_size": 64}


def _preactivated(source: Any) -> dict[str, Any]:  # noqa: ANN401 - timm's module
    return {
        "layers": [1, 1],
        "channels": (16, 32),
        "stem_chs": 8,
        "norm_layer": partial(source.GroupNormAct, num_groups=2),
    }


def _evolved(source: Any) -> dict[str, Any]:  # noqa: ANN401 - timm's module
    return _preactivated(source) | {
        "conv_layer": source.create_conv2d,
        "norm_layer": partial(source.EvoNorm2dS0, group_size=4),
    }


def _classified(model: nn.Module, inputs: Any, classes: int = CLASSES) -> Case:  # noqa: ANN401 - as ``Case.inputs``
    return Case(
        model=enlivened(model), inputs=inputs, targets=torch.randint(0, classes, (EXAMPLES,)), task="classification"
    )


def images(name: str, size: int = 16, key: str = "pixel_values", **options: Any) -> Builder:  # noqa: ANN401
    """A classifier of images of transformers."""

    def build() -> Case:
        model = model_of(name, num_labels=CLASSES, **options)
        return Case(
            model=model, inputs={key: normal(EXAMPLES, 3, size, size)}, targets=torch.randint(0, CLASSES, (EXAMPLES,)),
            task="classification",
        )  # fmt: skip

    return build


class Similarity(nn.Module):
    """Products of CLIP's two embeddings of the same example, scaled: numbers that need no other example."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        """Numbers (N, 8)."""
        found = self.clip(input_ids=input_ids, pixel_values=pixel_values)
        product: Tensor = found.text_embeds * found.image_embeds * self.clip.logit_scale.exp()
        return product


def clip() -> Case:
    """CLIP, both towers."""
    text = {**SMALL, "projection_dim": 8, "vocab_size": 31, "eos_token_id": 2}
    vision = {**_VIT, "image_size": 16, "patch_size": 8, "projection_dim": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    config._attn_implementation = "eager"  # noqa: SLF001 - how a config says it
    ids = tokens(EXAMPLES, 7)
    ids[:, -1] = 2
    return Case(
        model=enlivened(Similarity(transformers.CLIPModel(config))),
        inputs={"input_ids": ids, "pixel_values": normal(EXAMPLES, 3, 16, 16)},
        targets=normal(EXAMPLES, 8), task="regression",
    )  # fmt: skip


def detr() -> Case:
    """DETR: queries that are learned, classes of each."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"], layer_type="basic"
    )
    options = {key: value for key, value in SEQUENCE.items() if "token" not in key and key != "vocab_size"}
    model = model_of(
        "DetrForObjectDetection", num_queries=5, num_labels=3, use_timm_backbone=False, use_pretrained_backbone=False,
        backbone=None, backbone_config=backbone, **options,
    )  # fmt: skip
    inputs = {"pixel_values": normal(EXAMPLES, 3, 64, 64)}
    return Case(model=model, inputs=inputs, targets=torch.randint(0, 4, (EXAMPLES, 5)), task="classification")


def speech(name: str, **options: Any) -> Builder:  # noqa: ANN401 - a configuration's own
    """A classifier of sounds."""

    def build() -> Case:
        model = model_of(
            name, num_labels=CLASSES, conv_dim=(8, 8), conv_kernel=(5, 3), conv_stride=(4, 2), num_feat_extract_layers=2,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8, **(SMALL | options),
        )  # fmt: skip
        return Case(
            model=model, inputs={"input_values": normal(EXAMPLES, 80)}, targets=torch.randint(0, CLASSES, (EXAMPLES,)),
            task="classification",
        )  # fmt: skip

    return build


def whisper() -> Case:
    """Whisper: spectrograms in, tokens out."""
    model = model_of(
        "WhisperForConditionalGeneration", num_mel_bins=4, max_source_positions=8, max_target_positions=16, **SEQUENCE
    )
    ids = tokens(EXAMPLES, 7)
    return Case(
        model=model, inputs={"input_features": normal(EXAMPLES, 4, 16), "decoder_input_ids": ids.roll(1, 1)}, targets=ids,
        task="masked_lm",
    )  # fmt: skip


def perceiver() -> Case:
    """Perceiver: as many latents as tokens."""
    model = model_of(
        "PerceiverForMaskedLM", vocab_size=31, num_latents=9, d_latents=16, d_model=16, num_blocks=1,
        num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2, max_position_embeddings=9,
        qk_channels=16, v_channels=16,
    )  # fmt: skip
    ids = tokens(EXAMPLES, 9)
    kept = (torch.arange(9)[None] < torch.tensor([9, 4, 6, 3, 9, 5])[:, None]).long()
    targets = torch.where((torch.rand(ids.shape) < 0.5) & kept.bool(), ids, -100)
    return Case(
        model=model, inputs={"inputs": ids, "attention_mask": kept}, targets=targets, task="masked_lm",
        padded=lambda name: "input_preprocessor" in name or "encoder.cross_attention.attention.self." in name,
    )  # fmt: skip


_VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "embed_dim": 8, "embedding_size": 8}

CASES: dict[str, Builder] = {
    "timm ResNetV2, EvoNorm": built("resnetv2", "ResNetV2", 32, _evolved),
    "timm ResNetV2": timm("resnetv2_50", 32, layers=[1, 1, 1, 1], channels=[16, 16, 32, 32], stem_chs=8),
    "timm ResNetV2, standardised weights": built("resnetv2", "ResNetV2", 32, _preactivated),
    "timm EfficientNet": timm("test_efficientnet", 32),
    "timm MobileNetV3": timm("mobilenetv3_small_050", 32),
    "timm RegNet": built("regnet", "RegNet", 32, _regnet),
    "timm DenseNet": timm("densenet121", 32, growth_rate=4, block_config=(2, 2), bn_size=2),
    "timm CoAtNet": built("maxxvit", "MaxxVit", 64, _coatnet),
    "timm BYOBNet": built("byobnet", "ByobNet", 32, _gernet),
    "timm BEiT": timm("beit_base_patch16_224", 32, img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
    "timm EVA-02": timm("eva02_tiny_patch14_224", 28, img_size=28, patch_size=14, embed_dim=16, depth=2, num_heads=2),
    "timm SwinV2": timm("swinv2_tiny_window8_256", 32, img_size=32, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(2, 2)),
    "timm ViT": timm("vit_tiny_patch16_224", 32, img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
    "timm ConvNeXt": timm("convnext_atto", 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "timm NFNet": timm("nf_regnet_b0", 32),
    "timm MLP-Mixer": built("mlp_mixer", "MlpMixer", 32, lambda _: {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 2}),
    "timm XCiT": timm("xcit_nano_12_p16_224", 32, img_size=32, embed_dim=16, depth=1, num_heads=2),
    "timm CaiT": timm("cait_xxs24_224", 32, img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2),
    "timm InceptionNeXt": timm("inception_next_atto", 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "ViT": images("ViTForImageClassification", **_VIT),
    "DINOv2": images("Dinov2ForImageClassification", **_VIT),
    "BEiT": images("BeitForImageClassification", use_relative_position_bias=True, use_mask_token=True, **_VIT),
    "Swin": images("SwinForImageClassification", 32, image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4),
    "ResNet": images("ResNetForImageClassification", 32, **_STAGES),
    "ConvNeXt": images("ConvNextForImageClassification", 32, **_STAGES),
    "SegFormer": images("SegformerForImageClassification", 32, num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2], sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=8),
    "PoolFormer": images("PoolFormerForImageClassification", 32, depths=[1, 1], hidden_sizes=[8, 16], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], mlp_ratio=2.0),
    "MobileViT": images("MobileViTForImageClassification", 32, image_size=32, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16], num_attention_heads=2),
    "CLIP": clip,
    "DETR": detr,
    "Wav2Vec2": speech("Wav2Vec2ForSequenceClassification"),
    "WavLM": speech("WavLMForSequenceClassification"),
    "HuBERT": speech("HubertForSequenceClassification"),
    "Whisper": whisper,
    "Perceiver": perceiver,
}  # fmt: skip
