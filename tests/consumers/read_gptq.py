"""llmcompressor quantises by the exported Hessians: better than rounding, and without its fallback."""

import json
import statistics
import sys
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, sys.argv[2])
from nets import hessians, net

ARGUMENTS = QuantizationArgs(num_bits=4, symmetric=True, strategy="channel")


def quantised(weight: Tensor, hessian: Tensor, percdamp: float) -> tuple[Tensor, bool, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 7.5
    zero = torch.zeros_like(scale)
    made, _, fell_back = quantize_weight(
        weight.clone()[None], hessian.float().clone()[None], scale[None], zero[None], None, ARGUMENTS, percdamp=percdamp
    )
    return made[0], bool(fell_back.any()), (weight / scale).round().clamp(-8, 7) * scale


def error(weight: Tensor, other: Tensor, hessian: Tensor) -> float:
    off = (weight - other).double()
    return float((off @ hessian.double() @ off.T).trace())


def main() -> None:
    folder = Path(sys.argv[1])
    tensors = load_file(folder / "gptq")
    with safe_open(folder / "gptq", "pt") as opened:
        layers = json.loads(opened.metadata()["layers"])
    for name, module in net().named_children():
        if f"{name}.hessian" not in tensors:
            continue
        hessian, weight = tensors[f"{name}.hessian"], module.weight.detach()
        damped = hessian.double() + layers[name]["damping"] * torch.eye(len(hessian), dtype=torch.float64)
        made, fell_back, rounded = quantised(weight, damped, 0.0)
        ours, theirs = error(weight, made, hessian), error(weight, rounded, hessian)
        print(f"  layer {name}: weighted error {ours:.3g}, rounding {theirs:.3g}")
        assert not fell_back
        assert ours < theirs
    dampings = load_file(folder / "dampings.safetensors")
    ratios, fallbacks, usual_fallbacks = [], 0, 0
    for place, (name, hessian) in enumerate(hessians().items()):
        weight = torch.randn(8, 24, generator=torch.Generator().manual_seed(place))
        damped = hessian.double() + float(dampings[name]) * torch.eye(24, dtype=torch.float64)
        made, fell_back, _ = quantised(weight, damped, 0.0)
        usual, usual_fell_back, _ = quantised(weight, hessian, 0.01)
        fallbacks += fell_back
        usual_fallbacks += usual_fell_back
        if not usual_fell_back:
            ratios.append(error(weight, made, hessian) / max(error(weight, usual, hessian), 1e-30))
    print(
        f"  60 singular Hessians: {fallbacks} fallbacks (1 % damping: {usual_fallbacks}), "
        f"median error over that of 1 % damping {statistics.median(ratios):.3f}"
    )
    assert fallbacks == 0
    assert statistics.median(ratios) <= 1


main()
