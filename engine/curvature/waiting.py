"""Waiting factors: finished ones of one pass, laid aside until they are measured.

Where the factors of all layers do not fit into memory together, each pass over the data leaves
its own in a scratch place and frees them; they are read back one layer at a time, bit for bit.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.curvature.factors import Factors, digest, packed, unpacked
from engine.curvature.layers.layer import Form
from engine.workspace import Artifacts


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """One layer's factors in a scratch place; plain values, so that a checkpoint can name them."""

    layer: str
    form: Form
    bias: bool
    place: str
    """Stem of the file that holds G."""
    holder: str
    """Stem of the file that holds A: another layer's where the two share it."""
    in_dim: int
    out_dim: int
    diagonal: bool
    digest_A: str
    """Of A as it is stored."""
    digest_G: str
    scale_A: float
    scale_G: float

    def load(self, scratch: Artifacts) -> Factors:
        """Read them back."""
        stored_a, stored_g = self._stored(scratch)
        return Factors(
            layer=self.layer,
            form=self.form,
            bias=self.bias,
            A=stored_a if self.diagonal else unpacked(stored_a, self.in_dim),
            G=stored_g if self.form == "diagonal_block" else unpacked(stored_g, self.out_dim),
            scale_A=self.scale_A,
            scale_G=self.scale_G,
        )

    def intact(self, scratch: Artifacts) -> bool:
        """Whether they stand there as they were laid aside.

        Raises:
            FileNotFoundError: If they are gone.
        """
        stored_a, stored_g = self._stored(scratch)
        return (digest(stored_a), digest(stored_g)) == (self.digest_A, self.digest_G)

    def _stored(self, scratch: Artifacts) -> tuple[Tensor, Tensor]:
        return scratch.load_tensors(_file(self.holder, "A"))["A"], scratch.load_tensors(_file(self.place, "G"))["G"]


def lay_aside(scratch: Artifacts, factors: Factors, place: str, shared: Waiting | None) -> Waiting:
    """Write ``factors`` under the name ``place``; ``shared`` is whoever has written the same A already.

    Memory:
        One packed triangle.
    """
    diagonal = factors.A.ndim == 1
    if shared is None:
        own = factors.A.detach().to("cpu") if diagonal else packed(factors.A)
        scratch.save_tensors(_file(place, "A"), {"A": own}, {})
        digest_a = digest(own)
        del own
    else:
        digest_a = shared.digest_A
    gradient = packed(factors.G)
    scratch.save_tensors(_file(place, "G"), {"G": gradient}, {})
    return Waiting(
        layer=factors.layer,
        form=factors.form,
        bias=factors.bias,
        place=place,
        holder=place if shared is None else shared.holder,
        in_dim=factors.A.shape[0],
        out_dim=factors.G.shape[0],
        diagonal=diagonal,
        digest_A=digest_a,
        digest_G=digest(gradient),
        scale_A=factors.scale_A,
        scale_G=factors.scale_G,
    )


def _file(place: str, side: str) -> str:
    return f"{place}.{side}.safetensors"
