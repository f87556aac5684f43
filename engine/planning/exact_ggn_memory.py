"""What the cross-check takes: vectors of the covered parameters, P bytes each, beside the graph of a slice."""

_AT_ONCE = 8
_SHORT_BASIS = 8
_SHORTEST_BASIS = 3
"""Lanczos vectors: two Ritz vectors and what comes next."""


def probes_at_once(probes: int, vector_bytes: int, free_bytes: int) -> int:
    """Probes of one pass: a quarter of what is free, as the graph of a slice is to stand beside them."""
    return max(1, min(probes, _AT_ONCE, free_bytes // max(8 * vector_bytes, 1)))


def probe_bytes(at_once: int, vector_bytes: int) -> int:
    """Of so many probes in one pass: each one's sum and what enters it, the gradients, and the first one's vector."""
    return (2 * at_once + 2) * vector_bytes


def search_lengths(iterations: int) -> tuple[int, ...]:
    """Lengths of a Lanczos basis, the longest first."""
    return tuple(dict.fromkeys(min(iterations, longest) for longest in (iterations, _SHORT_BASIS, _SHORTEST_BASIS)))


def search_bytes(length: int, vector_bytes: int, *, on_device: bool, cuda: bool) -> tuple[int, int]:
    """Bytes on the device and on the host of bases of ``length``, the layers' and the model's.

    Beside the bases stand where each begins, what is summed for each and what is gathered for it, two P
    each; and the gradients of the whole model, with what differentiates them, three P.
    """
    around = 9
    if not cuda:
        return 0, (2 * length + around) * vector_bytes
    if on_device:
        return (2 * length + around) * vector_bytes, 0
    # the vectors that are multiplied visit the device
    return (around + 1) * vector_bytes, (2 * length + 4) * vector_bytes
