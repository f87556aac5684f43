"""The Woodbury identity, G + λI = λI + U Uᵀ: gradient sides that are kept as gradient rows U.

With few positions T and a wide output o, the rows of U take o·T numbers where G takes o².
"""

from typing import Literal

from catalog.record import FieldError, option, record

MAX_SKETCH_RANK = 65_536


@record
class Woodbury:
    """When G is kept as its gradient rows instead of their sum, and in which form."""

    policy: Literal["auto", "all", "hybrid", "dense"] = option(
        "auto", known_as={"kfac_policy": "", "kfac_use_woodbury": "true is `all`, false is `dense`"}
    )
    """`auto`: where the rows of all positions number at most (√2 − 1) times the outputs, so that they and their T×T
    Gram matrix take less than G; `all`: every layer with a dense G; `hybrid`: layers of `hybrid_from` outputs or more;
    `dense`: none."""
    store_device: Literal["auto", "device", "host"] = option("auto", known_as="woodbury_store_device")
    """Where the rows stand while they are collected. `auto`: on the host from 500 MB a layer."""
    dtype: Literal["auto", "fp16", "bf16", "fp32"] = option("auto", known_as="woodbury_dtype")
    """Precision of the rows. `auto`: that of the sums, and `fp16` where a layer's rows would take 500 MB or more.
    `fp16` rounds to 11 bits, times one power of two per position."""
    eps: float = option(1e-6, known_as="kfac_eps")
    """First jitter, relative to the mean diagonal, where a Cholesky factorisation fails; it grows tenfold at each
    attempt, and the record holds what was added."""
    softmax_head: bool = True
    """Whether a language model's head keeps its exact Fisher, a diagonal minus a matrix of low rank, where that is
    smaller than G."""
    approximate: bool = True
    """Whether a head may be sketched whose G and rows do not fit, or whose G is dense and larger than eigensolvers
    take (46,340 rows). What is then approximate is labelled so, with the sketch's bound; its diagonal and trace stay
    exact. Without, such a head keeps its diagonal alone, or the job is refused."""
    sketch_rank: int = 256
    """Rank of such a sketch."""
    hybrid_from: int = 16_384
    """Outputs from which `hybrid` keeps rows."""

    def __post_init__(self) -> None:
        """Refuse values outside their meaning."""
        if not 1e-16 <= self.eps <= 1:
            raise FieldError("eps", f"is {self.eps}; take a number from 1e-16 to 1")
        if not 1 <= self.sketch_rank <= MAX_SKETCH_RANK:
            raise FieldError("sketch_rank", f"is {self.sketch_rank}; take 1 to {MAX_SKETCH_RANK}")
        if self.hybrid_from < 1:
            raise FieldError("hybrid_from", f"is {self.hybrid_from}; take 1 (every layer) or more")
