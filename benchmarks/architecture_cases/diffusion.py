"""Denoisers of diffusers: noise of an image at a time step."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architecture_cases.case import EXAMPLES, Builder, Case, enlivened, normal


class Denoiser(nn.Module):
    """A denoiser whose output is flattened to one vector an example."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.inner = inner
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Predicted noise (N, numbers)."""
        found: Tensor = self.inner(**dict(zip(self.names, inputs, strict=True)), return_dict=False)[0]
        return found.flatten(1)


def denoiser(
    kind: str,
    shape: tuple[int, ...],
    besides: dict[str, Any],
    numbers: int,
    key: str = "sample",
    **options: Any,  # noqa: ANN401
) -> Builder:
    """A denoiser for inputs of ``shape``; ``besides`` are its other inputs' shapes, or what integers lie below."""

    def build() -> Case:
        inner = getattr(importlib.import_module("diffusers"), kind)(**options)
        others = [
            normal(EXAMPLES, *each) if isinstance(each, tuple) else torch.randint(0, each, (EXAMPLES,))
            for each in besides.values()
        ]
        model = enlivened(Denoiser(inner, (key, *besides)))
        inputs = (normal(EXAMPLES, *shape), *others)
        return Case(model=model, inputs=inputs, targets=normal(EXAMPLES, numbers), task="regression")

    return build


CASES: dict[str, Builder] = {
    "UNet2D": denoiser("UNet2DModel", (3, 8, 8), {"timestep": 100}, 192, sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4),
    "UNet2D, conditioned": denoiser("UNet2DConditionModel", (3, 8, 8), {"timestep": 100, "encoder_hidden_states": (5, 8)}, 192, sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1, cross_attention_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=4),
    "DiT": denoiser("DiTTransformer2DModel", (3, 8, 8), {"timestep": 100, "class_labels": 10}, 192, key="hidden_states", num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=3, num_layers=2, sample_size=8, patch_size=4, num_embeds_ada_norm=10),
    "PixArt": denoiser("PixArtTransformer2DModel", (4, 8, 8), {"encoder_hidden_states": (5, 8), "timestep": 100}, 256, key="hidden_states", num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=1, sample_size=8, patch_size=4, cross_attention_dim=16, caption_channels=8, use_additional_conditions=False),
    "SD3": denoiser("SD3Transformer2DModel", (4, 8, 8), {"encoder_hidden_states": (5, 8), "pooled_projections": (6,), "timestep": 100}, 256, key="hidden_states", num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=4, joint_attention_dim=8, caption_projection_dim=16, pooled_projection_dim=6, pos_embed_max_size=4),
    "Autoencoder": denoiser("AutoencoderKL", (3, 8, 8), {}, 192, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1, latent_channels=2, down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"), up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D")),
}  # fmt: skip
