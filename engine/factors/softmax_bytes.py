"""Bytes of a softmax head that is kept as its probabilities, and of what is asked of it."""

NUMBERS_AT_ONCE = 2**21
"""Numbers of the widened rows that are held at once: 16 MiB."""


def softmax_head_bytes(positions: int, classes: int, item: int, *, tied: bool = False) -> int:
    """Return the bytes of so many rows of probabilities, their weights, and a tied head's excess."""
    return positions * (classes * item + 8) + (8 * classes if tied else 0)


def dense_head_bytes(classes: int) -> int:
    """Return the bytes of the dense matrix in float64, and of the solver's copy."""
    return 2 * 8 * classes * classes


def capacitance_bytes(positions: int, classes: int) -> int:
    """Return what one solve or determinant takes: two T×T matrices, vectors of V, widened columns."""
    return 8 * (2 * positions * positions + 6 * classes + 3 * NUMBERS_AT_ONCE)


def iteration_bytes(size: int, vectors: int) -> int:
    """Return the bytes of so many vectors of Lanczos' iteration in float64, and of the bounds of a counted spectrum."""
    return 8 * size * (vectors + 8)
