"""Backbones: sizes and parameters of the published ones, names of tensors, and a chain that is the forward pass."""

import re

import pytest
import torch

from engine.fewshot.backbones import Pool, Stem, make_backbone

TABLE = [
    ("Conv4", "imagenet", 113_088, {84: (64, 5, 5), 224: (64, 14, 14), 28: (64, 1, 1)}),
    ("Conv6", "imagenet", 187_200, {84: (64, 5, 5), 224: (64, 14, 14), 28: (64, 1, 1)}),
    ("ResNet18", "imagenet", 11_176_512, {84: (512, 3, 3), 224: (512, 7, 7), 28: (512, 1, 1)}),
    ("ResNet34", "imagenet", 21_284_672, {84: (512, 3, 3), 224: (512, 7, 7)}),
    ("ResNet18", "feti", 11_171_904, {84: (512, 7, 7), 224: (512, 7, 7)}),
    ("ResNet34", "feti", 21_280_064, {84: (512, 7, 7), 224: (512, 7, 7)}),
]


@pytest.mark.part(of=24, by=("stem",))
@pytest.mark.parametrize(("name", "stem", "parameters", "maps"), TABLE)
def test_parameters_and_feature_sizes_are_the_published_ones(
    name: str, stem: Stem, parameters: int, maps: dict[int, tuple[int, int, int]]
) -> None:
    pools: tuple[Pool, ...] = ("map", "flatten", "gap")
    for pool in pools:
        with torch.device("meta"):
            backbone = make_backbone(name, stem=stem, pool=pool).eval()
        assert sum(each.numel() for each in backbone.parameters()) == parameters
        for size, (c, h, w) in maps.items():
            shape = {"map": (c, h, w), "flatten": (c * h * w,), "gap": (c,)}[pool]
            assert backbone.feature_shape(size) == shape
            if size < 200 or pool == "map":
                assert backbone(torch.empty(2, 3, size, size, device="meta")).shape == (2, *shape)


@pytest.mark.parametrize(("name", "stem"), [("Conv4", "imagenet"), ("ResNet18", "imagenet"), ("ResNet18", "feti")])
def test_feature_shape_is_that_of_a_forward_pass_at_every_size(name: str, stem: Stem) -> None:
    with torch.device("meta"):
        backbone = make_backbone(name, stem=stem, pool="flatten", channels=1).eval()
    for size in (16, 17, 31, 33, 63, 64):
        assert backbone(torch.empty(1, 1, size, size, device="meta")).shape[1:] == backbone.feature_shape(size)
        # images need not be square
        assert backbone(torch.empty(1, 1, size, 50, device="meta")).shape[1:] == backbone.feature_shape(size, 50)
        assert backbone(torch.empty(1, 1, 50, size, device="meta")).shape[1:] == backbone.feature_shape(50, size)


@pytest.mark.part(of=24, by=("pool",))
@pytest.mark.parametrize(
    ("name", "stem", "pool"),
    [
        *((name, "imagenet", pool) for name in ("Conv4", "Conv6", "ResNet18") for pool in ("gap", "flatten", "map")),
        ("ResNet18", "feti", "gap"),
        ("ResNet34", "feti", "flatten"),
    ],
)
def test_chain_and_stages_composed_are_the_forward_pass(name: str, stem: Stem, pool: Pool) -> None:
    options = {} if name.startswith("ResNet") else {"width": 8}
    backbone = make_backbone(name, stem=stem, pool=pool, **options).eval()
    images = torch.randn(2, 3, 32, 32)
    wanted = backbone(images)
    for blocks in (backbone.chain(), tuple(backbone.stages().values())):
        features = images
        for block in blocks:
            features = block(features)
        assert torch.equal(features, wanted)
    inside = [each for block in backbone.chain() for each in block.parameters()]
    assert [id(each) for each in inside] == [id(each) for each in backbone.parameters()]


def test_chain_has_a_block_for_each_residual_block_a_stem_and_the_pooling() -> None:
    with torch.device("meta"):
        lengths = {name: len(make_backbone(name).chain()) for name in ("Conv4", "Conv6", "ResNet18", "ResNet34")}
    assert lengths == {"Conv4": 5, "Conv6": 7, "ResNet18": 10, "ResNet34": 18}
    assert list(make_backbone("Conv4", width=2).stages()) == ["block1", "block2", "block3", "block4", "pool"]


def test_names_of_resnet18_are_those_of_torchvision() -> None:
    normalisation = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    wanted = ["conv1.weight", *(f"bn1.{each}" for each in normalisation)]
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            at = f"layer{layer}.{block}"
            wanted += [f"{at}.conv1.weight", *(f"{at}.bn1.{each}" for each in normalisation)]
            wanted += [f"{at}.conv2.weight", *(f"{at}.bn2.{each}" for each in normalisation)]
            if layer > 1 and block == 0:
                wanted += [f"{at}.downsample.0.weight", *(f"{at}.downsample.1.{each}" for each in normalisation)]
    with torch.device("meta"):
        state = make_backbone("ResNet18").state_dict()
    assert sorted(state) == sorted(wanted)
    assert state["conv1.weight"].shape == (64, 3, 7, 7)
    assert state["layer1.0.conv1.weight"].shape == (64, 64, 3, 3)
    assert state["layer2.0.downsample.0.weight"].shape == (128, 64, 1, 1)
    assert state["layer4.1.conv2.weight"].shape == (512, 512, 3, 3)


def test_a_resnet_is_the_one_written_out() -> None:
    backbone = make_backbone("ResNet18", pool="gap").double().train()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = backbone.state_dict()

    def normal(x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.mean((0, 2, 3), keepdim=True)
        spread = ((x - mean) ** 2).mean((0, 2, 3), keepdim=True)
        weight, bias = (state[f"{name}.{each}"].view(1, -1, 1, 1) for each in ("weight", "bias"))
        return (x - mean) / (spread + 1e-5).sqrt() * weight + bias

    def convolve(x: torch.Tensor, name: str, stride: int, padding: int) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, state[f"{name}.weight"], stride=stride, padding=padding)

    x = normal(convolve(images, "conv1", 2, 3), "bn1").clamp(min=0)
    x = torch.nn.functional.max_pool2d(x, 3, 2, 1)
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            at, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            inner = normal(convolve(x, f"{at}.conv1", stride, 1), f"{at}.bn1").clamp(min=0)
            inner = normal(convolve(inner, f"{at}.conv2", 1, 1), f"{at}.bn2")
            if stride == 2:
                x = normal(convolve(x, f"{at}.downsample.0", 2, 0), f"{at}.downsample.1")
            x = (inner + x).clamp(min=0)
    wanted = x.mean((2, 3))
    features = backbone(images).detach()
    assert float((features - wanted).abs().max()) <= 1e-11 * float(wanted.abs().max())


def test_weights_begin_as_published() -> None:
    torch.manual_seed(0)
    state = make_backbone("ResNet18").state_dict()
    assert float(state["layer4.1.conv2.weight"].std()) == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
    assert float(state["layer3.0.downsample.0.weight"].std()) == pytest.approx((2 / 256) ** 0.5, rel=0.02)
    conv = make_backbone("Conv4").state_dict()
    assert float(conv["blocks.2.conv.weight"].std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
    assert torch.equal(conv["blocks.2.bn.weight"], torch.ones(64))
    assert torch.equal(conv["blocks.2.bn.bias"], torch.zeros(64))


@pytest.mark.parametrize(
    ("name", "stem", "size", "smallest"),
    [("Conv4", "imagenet", 15, 16), ("Conv6", "imagenet", 1, 16), ("ResNet18", "feti", 2, 3)],
)
def test_an_empty_map_is_refused_with_the_smallest_size(name: str, stem: Stem, size: int, smallest: int) -> None:
    backbone = make_backbone(name, stem=stem)
    with pytest.raises(ValueError, match=rf"{name} is empty for images of size {size}; .* that works is {smallest}$"):
        backbone.feature_shape(size)
    with pytest.raises(ValueError, match=f"that works is {smallest}"):
        backbone(torch.zeros(2, 3, size, 40))
    assert backbone.eval()(torch.zeros(2, 3, smallest, smallest)).shape == (2, *backbone.feature_shape(smallest))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Conv5", {}, "`backbone` must be one of Conv4, Conv6, ResNet18, ResNet34 (got 'Conv5')"),
        ("Conv4", {"pool": "max"}, "`pool` must be one of gap, flatten, map (got 'max')"),
        ("Conv4", {"stem": "feti"}, "Conv4 has none"),
        ("Conv4", {"width": 0}, "`width` and `channels` must be at least 1 (got 0 and 3)"),
        ("ResNet18", {"stem": "cifar"}, "`stem` must be one of imagenet, feti (got 'cifar')"),
        ("ResNet18", {"width": 32}, "ResNet18 begins at 64 (got 32)"),
        ("ResNet34", {"channels": 0}, "`channels` must be at least 1 (got 0)"),
    ],
)
def test_what_no_backbone_has_is_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_backbone(name, **options)  # type: ignore[arg-type]
