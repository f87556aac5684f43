"""Bytes of each representation of G that is not dense, and of what is asked of it."""

NUMBERS_AT_ONCE = 2**21
"""Numbers of the widened rows that are held at once: 16 MiB in float64."""


def low_rank_bytes(rows: int, size: int, item: int) -> int:
    """Return the bytes of T rows of n numbers, of ``item`` bytes each, with their scales."""
    return rows * (size * item + 8)


def gram_bytes(rows: int, size: int, *, on_device: bool = False) -> int:
    """Return the bytes in float64 of the Gram matrix (T, T) of rows of n numbers, its decomposition, and wide chunks.

    On a device cuSOLVER takes five matrices beside it; LAPACK takes three.
    """
    return (6 if on_device else 4) * rows * rows * 8 + 3 * 8 * min(NUMBERS_AT_ONCE, rows * size)


def basis_bytes(rows: int, size: int) -> int:
    """Return the bytes of the eigenvectors of T rows of n numbers, in float64: 8 n · min(T, n)."""
    return min(rows, size) * size * 8


def diagonal_sketch_bytes(size: int, rank: int, item: int) -> int:
    """Return the bytes of both diagonals, and of a sketch with room for as many rows again."""
    return 8 * 2 * size + 2 * rank * (size * item + 8)


def softmax_head_bytes(positions: int, classes: int, item: int, *, tied: bool = False) -> int:
    """Return the bytes of rows of probabilities, their weights, and a tied head's excess."""
    return positions * (classes * item + 8) + (8 * classes if tied else 0)


def dense_head_bytes(classes: int) -> int:
    """Return the bytes of the dense matrix (V, V) in float64, and of the solver's copy."""
    return 2 * 8 * classes * classes


def capacitance_bytes(positions: int, classes: int) -> int:
    """Return the bytes in float64 of one solve or determinant: two T×T matrices, vectors of V, widened columns."""
    return 8 * (2 * positions * positions + 6 * classes + 3 * NUMBERS_AT_ONCE)


def iteration_bytes(size: int, vectors: int) -> int:
    """Return the bytes of Lanczos vectors of n float64 numbers, and of a counted spectrum's bounds."""
    return 8 * size * (vectors + 8)
