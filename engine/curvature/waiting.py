"""Waiting factors: finished ones of one pass, laid aside until they are measured.

Where the factors of all layers do not fit into memory together, each pass over the data leaves
its own in a scratch place and frees them; they are read back one layer at a time, bit for bit.
"""

from collections.abc import Callable

from torch import Tensor

from engine.curvature.factors import Factors, packed, unpacked
from engine.workspace import Artifacts


def lay_aside(scratch: Artifacts, factors: Factors, place: int, shared_place: int | None) -> Callable[[], Factors]:
    """Write ``factors`` under the number ``place`` and return how to read them back.

    ``shared_place`` names the layer that has written the same A already.

    Memory:
        One packed triangle.
    """
    layer, form, bias, size = factors.layer, factors.form, factors.bias, factors.A.shape[0]
    diagonal, width = factors.A.ndim == 1, factors.G.shape[0]
    if shared_place is None:
        own = factors.A.detach().to("cpu") if diagonal else packed(factors.A)
        scratch.save_tensors(f"{place}.A.safetensors", {"A": own}, {})
    scratch.save_tensors(f"{place}.G.safetensors", {"G": packed(factors.G)}, {})
    holder = place if shared_place is None else shared_place

    def read_back() -> Factors:
        stored: Tensor = scratch.load_tensors(f"{holder}.A.safetensors")["A"]
        return Factors(
            layer=layer,
            form=form,
            bias=bias,
            A=stored if diagonal else unpacked(stored, size),
            G=unpacked(scratch.load_tensors(f"{place}.G.safetensors")["G"], width),
        )

    return read_back
