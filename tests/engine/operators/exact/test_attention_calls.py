"""Attention in blocks against the plain formula in float64: values, tangents, pullbacks and second derivatives."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from engine.errors import ModelRefused
from engine.operators.exact.attention_calls import AttentionCalls
from engine.operators.exact.tangents import Tangents

EXACT = 1e-12
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 7, 9, 3


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """The formula, head by head of the queries; a query that sees nothing gets nothing."""
    group = query.shape[-3] // key.shape[-3]
    key, value = (part.repeat_interleave(group, -3) for part in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~seen, -1e300)
    chances = torch.softmax(scores, -1).masked_fill(~seen, 0.0)
    return chances @ value


MASKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "none": (None, {}),
    "causal": (None, {"is_causal": True}),
    "scale": (None, {"scale": 0.3}),
    "bool": (lambda: torch.rand(BATCH, 1, 1, KEYS) > 0.4, {}),
    "bool_heads": (lambda: torch.rand(HEADS, QUERIES, KEYS) > 0.4, {}),
    "nothing_seen": (lambda: torch.ones(QUERIES, KEYS).bool() & (torch.arange(QUERIES) != 3)[:, None], {}),
    "float": (lambda: torch.randn(QUERIES, KEYS).double(), {}),
    "float_heads": (lambda: torch.randn(1, HEADS, QUERIES, KEYS).double(), {}),
    "float_batch": (lambda: torch.randn(BATCH, 1, 1, KEYS).double(), {}),
}


def operands(kind: str, group: int) -> tuple[list[Tensor], Tensor | None, dict[str, Any]]:
    torch.manual_seed(1)
    make, options = MASKS[kind]
    heads = HEADS // group
    tensors = [
        torch.randn(BATCH, HEADS, QUERIES, WIDTH), torch.randn(BATCH, heads, KEYS, WIDTH),
        torch.randn(BATCH, heads, KEYS, WIDTH + 1),
    ]  # fmt: skip
    mask = None if make is None else make()
    return [own.double() for own in tensors], mask, options | ({"enable_gqa": True} if group > 1 else {})


def blocked(own: list[Tensor], mask: Tensor | None, options: dict[str, Any], at_once: int) -> Tensor:
    with AttentionCalls(at_once=at_once):
        found: Tensor = nn.functional.scaled_dot_product_attention(*own, attn_mask=mask, **options)
    return found


def formula(own: list[Tensor], mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    return plain(*own, mask, bool(options.get("is_causal")), options.get("scale"))


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).detach().norm() / truth.detach().norm().clamp_min(1e-300))


# one pair at a time, blocks that no dimension divides evenly, all at once
@pytest.mark.part(of=32, by=("kind",))
@pytest.mark.parametrize("at_once", [1, 25, 160, 10**6])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("kind", list(MASKS))
def test_values_and_all_derivatives_are_the_formulas(kind: str, group: int, at_once: int) -> None:
    own, mask, options = operands(kind, group)
    biased = mask is not None and mask.is_floating_point()
    every = [part.requires_grad_() for part in (*own, *([mask] if biased and mask is not None else []))]
    along = [torch.randn_like(part) for part in every]
    truth, found = formula(own, mask, options), blocked(own, mask, options, at_once)
    assert relative(found, truth) < EXACT
    u = torch.randn_like(truth)
    pairs = []
    for output in (truth, found):
        gradients = torch.autograd.grad(output, every, u, create_graph=True)
        inner = torch.stack([(g * a).sum() for g, a in zip(gradients, along, strict=True)]).sum()
        pairs.append((gradients, torch.autograd.grad(inner, every)))
    for of_truth, of_found in zip(*pairs, strict=True):
        for left, right in zip(of_truth, of_found, strict=True):
            assert relative(right, left) < EXACT
    with torch.no_grad(), forward_ad.dual_level():
        moving = [forward_ad.make_dual(part.detach(), a) for part, a in zip(every, along, strict=True)]
        tangent = forward_ad.unpack_dual(formula(moving[:3], moving[3] if biased else mask, options)).tangent
    tangents = Tangents(2)
    for part, a in zip(every, along, strict=True):
        tangents.put(part, [a, None])
    with AttentionCalls(tangents, at_once=at_once), tangents:
        pushed = tangents.of(nn.functional.scaled_dot_product_attention(*own, attn_mask=mask, **options))
    assert pushed is not None
    assert pushed[1] is None
    assert pushed[0] is not None
    assert relative(pushed[0], tangent) < EXACT


def test_differences_confirm_both_derivatives() -> None:
    own, mask, options = operands("float_heads", 2)
    assert mask is not None
    # every number is moved for itself: a corner is enough
    own, mask = [part[:1, ..., :3, :2].contiguous() for part in own], mask[..., :3, :3]
    every = [part.requires_grad_() for part in own]

    def function(*parts: Tensor) -> Tensor:
        return blocked(list(parts), mask, options, 5)

    assert gradcheck(function, every)
    assert gradgradcheck(function, every)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3)])
def test_any_number_of_leading_dimensions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    own = [torch.randn(*shape, 5, WIDTH).double() for _ in range(3)]
    assert relative(blocked(own, None, {}, 20), nn.functional.scaled_dot_product_attention(*own)) < EXACT


def test_torchs_own_attention_module_is_answered_too() -> None:
    torch.manual_seed(3)
    module = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x = torch.randn(2, 5, 4).double()
    truth = module(x, x, x, need_weights=False)[0]
    calls = AttentionCalls()
    with calls:
        found = module(x, x, x, need_weights=False)[0]
    assert relative(found, truth) < EXACT
    with calls:
        gradient = torch.autograd.grad(
            module(x, x, x, need_weights=False)[0].sum(), module.in_proj_weight, create_graph=True
        )[0]
        assert torch.autograd.grad(gradient.square().sum(), module.in_proj_weight)[0].isfinite().all()


def test_sixteen_bits_are_summed_in_thirty_two() -> None:
    own, _, _ = operands("none", 1)
    narrow = [part.to(torch.bfloat16) for part in own]
    found = blocked(narrow, None, {}, 25)
    assert found.dtype == torch.bfloat16
    assert relative(found.double(), formula([part.double() for part in narrow], None, {})) < 2**-8


def test_what_drops_out_is_refused_and_what_is_wrong_is_torchs_to_refuse() -> None:
    own, mask, _ = operands("float", 1)
    with pytest.raises(ModelRefused, match="dropout_p"), AttentionCalls():
        nn.functional.scaled_dot_product_attention(*own, dropout_p=0.1)
    with pytest.raises(RuntimeError), AttentionCalls():
        nn.functional.scaled_dot_product_attention(*own, attn_mask=mask, is_causal=True)


def test_no_block_holds_the_scores_of_all_heads() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415 - for this test alone

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for each in found if isinstance(found, (tuple, list)) else (found,):
                largest = max(largest, each.untyped_storage().nbytes() // 8 if isinstance(each, Tensor) else 0)
            return found

    own = [torch.randn(2, 4, 64, 8).double().requires_grad_() for _ in range(3)]
    with AttentionCalls(at_once=512), Sizes():
        output = nn.functional.scaled_dot_product_attention(*own, is_causal=True)
        gradients = torch.autograd.grad(output.sum(), own, create_graph=True)
        torch.autograd.grad(gradients[0].square().sum(), own)
    # operands are of 4096 numbers, all scores together of 32768
    assert 2 * math.prod((4, 64, 8)) <= largest < 2 * 4 * 64 * 64 // 4
