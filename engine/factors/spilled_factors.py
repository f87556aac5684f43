"""Spilled factors: finished factors of one pass, in scratch files until they are measured.

Where the factors of all layers do not fit into memory together, each pass over the data spills
its own and frees them; they are read back one layer at a time, bit for bit.
"""

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from engine.artifacts import Artifacts
from engine.factors.kronecker_factors import Factors, TiedParts, digest, packed, unpacked
from engine.factors.representation import read_structured
from engine.layers.layer import Form
from engine.linalg.linear_operator import Structured


@dataclass(frozen=True, kw_only=True)
class SpilledFactors:
    """One layer's factors in scratch files; plain values, so that a checkpoint can name them."""

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
    """Digest of A as it is stored."""
    digest_G: str
    scale_A: float
    scale_G: float
    kind: str = "dense"
    """How G is kept."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata that reading a structured G needs besides its tensors."""
    digests_head: Mapping[str, str] = field(default_factory=dict)
    """Digests of the diagonal of the head's own G and the parts of its product, by name; none without such a file."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold the factors; that of A may be another layer's, too."""
        head = (_file(self.place, "head"),) if self.digests_head else ()
        return _file(self.holder, "A"), _file(self.place, "G"), *head

    def load(self, scratch: Artifacts) -> Factors:
        """Read the factors back.

        Args:
            scratch: Where they were written.

        Returns:
            The factors, bit for bit as they were.

        Raises:
            OSError: EIO, if the files are damaged or gone: the next attempt finds that too, and collects them anew.
        """
        stored_a, stored_g, head = self._verified(scratch)
        beside = {} if head is None else head
        if isinstance(stored_g, Tensor) and self.form != "diagonal_block":
            stored_g = unpacked(stored_g, self.out_dim)
        return Factors(
            layer=self.layer,
            form=self.form,
            bias=self.bias,
            A=stored_a if self.diagonal else unpacked(stored_a, self.in_dim),
            G=stored_g,
            scale_A=self.scale_A,
            scale_G=self.scale_G,
            head_diagonal=beside.get("head"),
            tied=TiedParts.read(beside, in_dim=self.in_dim, bias=self.bias),
        )

    def intact(self, scratch: Artifacts) -> bool:
        """Return whether the files hold the factors as they were written.

        Args:
            scratch: Where they were written.

        Returns:
            Whether every digest agrees.
        """
        try:
            self._verified(scratch)
        except OSError:
            return False
        return True

    def _verified(self, scratch: Artifacts) -> tuple[Tensor, Tensor | Structured, dict[str, Tensor] | None]:
        damaged = OSError(errno.EIO, f"the spilled factors of {self.layer} are damaged")
        try:
            stored_a, stored_g = self._stored(scratch)
            head = scratch.load_tensors(_file(self.place, "head")) if self.digests_head else None
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # the port's own errors, and whatever a damaged file makes a reader say
            raise damaged from error
        agree = (digest(stored_a), digest(stored_g)) == (self.digest_A, self.digest_G)
        if not agree or _digests(head or {}) != self.digests_head:
            raise damaged
        return stored_a, stored_g, head

    def _stored(self, scratch: Artifacts) -> tuple[Tensor, Tensor | Structured]:
        activation, gradient = (
            scratch.load_tensors(_file(self.holder, "A")),
            scratch.load_tensors(_file(self.place, "G")),
        )
        if self.kind == "dense":
            return activation["A"], gradient["G"]
        return activation["A"], read_structured(self.kind, gradient, self.metadata)


def spill(scratch: Artifacts, factors: Factors, place: str, shared: SpilledFactors | None) -> SpilledFactors:
    """Write a layer's factors to scratch files.

    Args:
        scratch: Where to write.
        factors: The layer's A and G.
        place: Stem of the files' names.
        shared: The spilled layer that has written the same A already; None to write A too.

    Returns:
        A record by which they are read back.

    Memory:
        One packed triangle.
    """
    side = factors.side_G
    if shared is None:
        own = packed(factors.A)
        scratch.save_tensors(_file(place, "A"), {"A": own}, {})
        digest_a = digest(own)
        del own
    else:
        digest_a = shared.digest_A
    gradient = {"G": packed(factors.dense_G)} if side.kind == "dense" else side.tensors()
    scratch.save_tensors(_file(place, "G"), gradient, side.metadata())
    head: dict[str, Tensor] = {}
    if factors.head_diagonal is not None:
        head = {"head": factors.head_diagonal, **({} if factors.tied is None else factors.tied.stored())}
        scratch.save_tensors(_file(place, "head"), head, {})
    return SpilledFactors(
        layer=factors.layer,
        form=factors.form,
        bias=factors.bias,
        place=place,
        holder=place if shared is None else shared.holder,
        in_dim=factors.A.shape[0],
        out_dim=side.size,
        diagonal=factors.side_A.is_diagonal,
        digest_A=digest_a,
        digest_G=digest(gradient["G"]) if side.kind == "dense" else side.digest(),
        scale_A=factors.scale_A,
        scale_G=factors.scale_G,
        kind=side.kind,
        metadata=side.metadata(),
        digests_head=_digests(head),
    )


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def _file(place: str, side: str) -> str:
    return f"{place}.{side}.safetensors"
