"""Heads against loops over queries, classes and shots, written from the formulas of the papers."""

import math
import re
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from engine.fewshot.cosine_transformer import FewShotTransformer
from engine.fewshot.heads import CTX, METHODS, ProtoNet, make_head

WAYS, SHOTS, QUERIES = 3, 2, 5
NORMS = 1e-6


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y) / (x.norm().clamp(min=NORMS) * y.norm().clamp(min=NORMS))


def normalised(x: Tensor, layer: torch.nn.Module) -> Tensor:
    spread = ((x - x.mean()) ** 2).mean()
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return (x - x.mean()) / (spread + 1e-5).sqrt() * weight + bias


def by_loops(score: Callable[[int, int], Tensor], queries: int = QUERIES) -> Tensor:
    return torch.stack([torch.stack([score(i, c) for c in range(WAYS)]) for i in range(queries)])


def agrees(scores: Tensor, wanted: Tensor) -> bool:
    scores, wanted = scores.detach(), wanted.detach()
    return float((scores - wanted).abs().max()) <= 1e-11 * float(wanted.abs().max())


def scattered(head: torch.nn.Module) -> torch.nn.Module:
    """A head in float64 with no parameter at a value that hides a mistake, such as 0 or 1."""
    head.double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each in head.parameters():
            each.add_(0.3 * torch.randn(each.shape, generator=generator, dtype=torch.float64))
    return head


@pytest.mark.parametrize("shape", [(7,), (4, 3, 2)])
def test_protonet_is_the_squared_distance_to_the_mean(shape: tuple[int, ...]) -> None:
    support, queries = drawn(WAYS, SHOTS, *shape), drawn(QUERIES, *shape)

    def score(i: int, c: int) -> Tensor:
        prototype = sum(support[c, j] for j in range(SHOTS)) / SHOTS
        return -((queries[i] - prototype) ** 2).sum()

    assert agrees(ProtoNet()(support, queries), by_loops(score))


@pytest.mark.parametrize("attention", ["softmax", "cosine"])
def test_ctx_spatial_attends_to_every_position(attention: Literal["softmax", "cosine"]) -> None:
    channels, h, w, width = 6, 3, 2, 8
    head = scattered(CTX(channels, attention=attention, width=width))
    support, queries = drawn(WAYS, SHOTS, channels, h, w), drawn(QUERIES, channels, h, w)
    keys, values = (getattr(head, name).weight[:, :, 0, 0] for name in ("keys", "values"))

    def score(i: int, c: int) -> Tensor:
        places = [(j, y, x) for j in range(SHOTS) for y in range(h) for x in range(w)]
        total = torch.zeros((), dtype=torch.float64)
        for y in range(h):
            for x in range(w):
                query = keys @ queries[i, :, y, x]
                others = [keys @ support[c, j, :, t, u] for j, t, u in places]
                if attention == "cosine":
                    weights = [cosine(query, each) for each in others]
                else:
                    powers = [(query @ each / math.sqrt(width)).exp() for each in others]
                    weights = [each / sum(powers) for each in powers]
                prototype = sum(
                    weight * (values @ support[c, j, :, t, u])
                    for weight, (j, t, u) in zip(weights, places, strict=True)
                )
                total += ((values @ queries[i, :, y, x] - prototype) ** 2).sum()
        return -total / (h * w)

    assert agrees(head(support, queries), by_loops(score))


@pytest.mark.parametrize("attention", ["softmax", "cosine"])
def test_ctx_shots_attends_to_whole_maps(attention: Literal["softmax", "cosine"]) -> None:
    channels, h, w, width = 6, 3, 2, 8
    head = scattered(CTX(channels, attention=attention, form="shots", width=width))
    assert [name for name, _ in head.named_parameters()] == ["keys.weight"]
    support, queries = drawn(WAYS, SHOTS, channels, h, w), drawn(QUERIES, channels, h, w)
    weight = head.keys.weight[:, :, 0, 0]

    def vector(image: Tensor) -> Tensor:
        return torch.einsum("ec,chw->ehw", weight, image).flatten()

    def score(i: int, c: int) -> Tensor:
        query, others = vector(queries[i]), [vector(support[c, j]) for j in range(SHOTS)]
        if attention == "cosine":
            weights = [cosine(query, each) for each in others]
        else:
            products = torch.stack([query @ each / math.sqrt(width) for each in others])
            weights = list((products - products.logsumexp(0)).exp())
        prototype = sum(share * each for share, each in zip(weights, others, strict=True))
        return -((query - prototype) ** 2).sum() / (h * w)

    assert agrees(head(support, queries), by_loops(score))


def test_ctx_shots_with_one_shot_is_a_protonet_of_projected_maps() -> None:
    head = scattered(CTX(6, form="shots", width=8))
    support, queries = drawn(WAYS, 1, 6, 3, 2), drawn(QUERIES, 6, 3, 2)
    with torch.no_grad():
        projected = head.keys(support.flatten(0, 1)).unflatten(0, (WAYS, 1))
        wanted = ProtoNet()(projected, head.keys(queries)) / 6
        assert agrees(head(support, queries), wanted)


@pytest.mark.parametrize("attention", ["softmax", "cosine"])
@pytest.mark.parametrize("readout", ["cosine", "linear"])
def test_fsct_is_its_five_formulas(
    attention: Literal["softmax", "cosine"], readout: Literal["cosine", "linear"]
) -> None:
    d, heads, size, hidden = 12, 3, 4, 10
    made = FewShotTransformer(d, SHOTS, attention=attention, readout=readout, heads=heads, head_dim=size, hidden=hidden)
    head = scattered(made)
    support, queries = drawn(WAYS, SHOTS, d), drawn(QUERIES, d)
    powers = made.shot_weights.exp()

    def projected(row: Tensor) -> Tensor:
        return made.in_projection[1].weight @ normalised(row, made.in_projection[0])

    def attended(i: int, c: int) -> Tensor:
        prototype = sum(powers[j] / powers.sum() * support[c, j] for j in range(SHOTS))
        key, value = projected(prototype), projected(queries[i])
        parts = []
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            share = cosine(key[part], value[part]) if attention == "cosine" else 1.0
            parts.append(share * value[part])
        return made.out_projection.weight @ torch.cat(parts) + made.out_projection.bias + prototype

    def score(i: int, c: int) -> Tensor:
        out = attended(i, c)
        norm, first, _, second = made.feed_forward
        inner = first.weight @ normalised(out, norm) + first.bias
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        x = out + second.weight @ inner + second.bias
        y = made.readout[1].weight @ normalised(x, made.readout[0]) + made.readout[1].bias
        if readout == "cosine":
            return 2 * made.readout[2].scale * cosine(y, made.readout[2].direction)
        return made.readout[2][0].weight[0] @ y + made.readout[2][0].bias[0]

    with torch.no_grad():
        assert agrees(head(support, queries), by_loops(score))
        out = made.attention_output(support, queries)
        assert out.shape == (QUERIES, WAYS, d)
        assert agrees(out, torch.stack([torch.stack([attended(i, c) for c in range(WAYS)]) for i in range(QUERIES)]))
        assert torch.equal(made.scores_of(out), head(support, queries))


@pytest.mark.parametrize("d", [512, 1600])
def test_fsct_has_the_published_number_of_parameters(d: int) -> None:
    head = make_head("FSCT_softmax", k_shot=5, feature_shape=(d,))
    # biases of the feed-forward part and the readout, the readout's last layer, and the shots
    assert sum(each.numel() for each in head.parameters()) == 2120 * d + 512 + 64 + 65 + 5
    assert head.shot_weights.shape == (5,)


@pytest.mark.parametrize("method", METHODS)
def test_a_head_gives_the_same_scores_to_a_query_alone_and_takes_any_number_of_classes(method: str) -> None:
    shape = (6, 2, 2)
    head = scattered(make_head(method, k_shot=SHOTS, feature_shape=shape, heads=2, head_dim=4, hidden=8))
    support, queries = drawn(4, SHOTS, *shape), drawn(QUERIES, *shape)
    with torch.no_grad():
        scores = head(support, queries)
        assert scores.shape == (QUERIES, 4)
        assert agrees(torch.cat([head(support, each[None]) for each in queries]), scores)
        assert agrees(head(support[:2], queries), scores[:, :2])


@pytest.mark.parametrize("method", METHODS)
def test_equal_and_zero_features_give_finite_scores_and_gradients(method: str) -> None:
    shape = (6, 2, 2)
    head = make_head(method, k_shot=SHOTS, feature_shape=shape)
    for value in (0.0, 1.0):
        support = torch.full((WAYS, SHOTS, *shape), value, requires_grad=True)
        queries = torch.full((QUERIES, *shape), value, requires_grad=True)
        scores = head(support, queries)
        scores.square().sum().backward()
        for each in (scores, support.grad, queries.grad, *(one.grad for one in head.parameters())):
            assert each is None or bool(each.isfinite().all())


@pytest.mark.parametrize("method", METHODS)
def test_scores_of_16_bits_are_float32_and_near(method: str) -> None:
    shape = (6, 2, 2)
    torch.manual_seed(0)
    head = make_head(method, k_shot=SHOTS, feature_shape=shape)
    support, queries = drawn(WAYS, SHOTS, *shape).float(), drawn(QUERIES, *shape).float()
    with torch.no_grad():
        wanted = head(support, queries)
        with torch.autocast("cpu", torch.bfloat16):
            scores = head(support.bfloat16(), queries.bfloat16())
    assert wanted.dtype == scores.dtype == torch.float32
    assert float((scores - wanted).abs().max()) <= 0.1 * max(float(wanted.abs().max()), 1)


def test_other_shots_than_the_heads_are_refused_with_both_numbers() -> None:
    head = make_head("FSCT_cosine", k_shot=5, feature_shape=(12,))
    with pytest.raises(ValueError, match=r"`k_shot` must be 5.*\(got 1\)"):
        head(torch.zeros(WAYS, 1, 12), torch.zeros(QUERIES, 12))


@pytest.mark.parametrize(
    ("method", "shape", "options", "message"),
    [
        ("MatchingNet", (8,), {}, "`method` must be one of ProtoNet, CTX_softmax"),
        ("CTX_cosine", (8,), {}, "CTX_cosine needs maps (c, h, w), and got features (8,); take `pool: map`"),
        ("CTX_softmax", (8, 1, 1), {"form": "rows"}, "`form` spatial or shots (got 'softmax' and 'rows')"),
        ("FSCT_cosine", (8,), {"readout": "mean"}, "`readout` cosine or linear (got 'cosine' and 'mean')"),
        ("FSCT_cosine", (8,), {"heads": 0}, "must be at least 1 (got 8, 5, 0, 64 and 512)"),
    ],
)
def test_what_no_head_has_is_refused(
    method: str, shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_head(method, k_shot=5, feature_shape=shape, **options)  # type: ignore[arg-type]


def test_ctx_refuses_vectors() -> None:
    with pytest.raises(ValueError, match=re.escape("CTX needs maps (c, h, w), and got features (8,)")):
        CTX(8)(torch.zeros(WAYS, SHOTS, 8), torch.zeros(QUERIES, 8))
