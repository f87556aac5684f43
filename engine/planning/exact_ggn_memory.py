"""Exact GGN memory: vectors of the covered parameters, P bytes each, beside the graph of a slice."""

_AT_ONCE = 8
_SHORT_BASIS = 8
_SHORTEST_BASIS = 3
"""Lanczos vectors: two Ritz vectors and what comes next."""


def probes_at_once(probes: int, vector_bytes: int, free_bytes: int) -> int:
    """Return how many probes one pass takes.

    Args:
        probes: Probes asked for.
        vector_bytes: P, bytes of one vector of the covered parameters.
        free_bytes: Bytes that may still be taken.

    Returns:
        From 1 to 8, taking a quarter of the free bytes, as the graph of a slice is held beside them.
    """
    return max(1, min(probes, _AT_ONCE, free_bytes // max(8 * vector_bytes, 1)))


def probe_bytes(at_once: int, vector_bytes: int) -> int:
    """Return the bytes of several probes in one pass."""
    return (2 * at_once + 2) * vector_bytes


def search_lengths(iterations: int) -> tuple[int, ...]:
    """Return the lengths of a Lanczos basis that are tried, the longest first.

    Args:
        iterations: Products asked for.

    Returns:
        Up to three numbers of vectors, none above ``iterations``.
    """
    return tuple(dict.fromkeys(min(iterations, longest) for longest in (iterations, _SHORT_BASIS, _SHORTEST_BASIS)))


def search_bytes(length: int, vector_bytes: int, *, on_device: bool, cuda: bool) -> tuple[int, int]:
    """Return the bytes of the Lanczos bases of all layers and of the whole model.

    Beside the bases there are, for each, its start, its sum and what is gathered for it, two P
    each; and the gradients of the whole model, with what differentiates them, three P.

    Args:
        length: Vectors in each basis.
        vector_bytes: P, bytes of one vector of the covered parameters.
        on_device: Whether the bases are held on the device.
        cuda: Whether the job computes on a CUDA device.

    Returns:
        Bytes on the device and on the host.
    """
    around = 9
    if not cuda:
        return 0, (2 * length + around) * vector_bytes
    if on_device:
        return (2 * length + around) * vector_bytes, 0
    # the vectors that are multiplied visit the device
    return (around + 1) * vector_bytes, (2 * length + 4) * vector_bytes
