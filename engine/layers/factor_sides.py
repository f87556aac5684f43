"""The sides of a layer: the shapes of the factors that it sums itself."""

from collections.abc import Iterator

from engine.layers.layer import TreatedLayer


def factor_sides(layer: TreatedLayer, *, follows: bool) -> Iterator[tuple[int, int]]:
    """Yield the shape of each factor that a layer holds itself.

    Args:
        follows: Whether it shares the A of another, and holds none.

    Returns:
        (groups, rows) of G, then of A; a diagonal factor is so many groups of one row.
    """
    yield (layer.out_dim, 1) if layer.form == "diagonal_block" else (layer.groups, layer.out_dim)
    if not follows and layer.form not in ("block", "diagonal_block"):
        yield (layer.in_dim, 1) if layer.form == "diagonal" else (layer.groups, layer.in_dim)
