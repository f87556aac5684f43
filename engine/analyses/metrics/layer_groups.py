"""Groups of layers by a caller's own names: which layers each holds, and that it holds them whole."""

from collections.abc import Iterable, Mapping, Sequence

from engine.errors import UsageError
from engine.layers.layer import TreatedLayer

ALL = "scores"
_POINTER = "/influence/groups"


def layer_groups(asked: Mapping[str, Sequence[str]], known: Sequence[str], *, parts: bool) -> dict[str, frozenset[str]]:
    """Return the layers of each group by its name, those of all layers first.

    Args:
        asked: Names of layers, or of modules that hold them, by the group's name.
        known: Names of the layers, or of the parameters where it is not known yet which layers there are.
        parts: Whether parts of layers (`name[0]`) are among them.

    Raises:
        UsageError: If one of the names belongs to no layer.
    """
    found = {ALL: frozenset(known)}
    for name, wanted in asked.items():
        own: set[str] = set()
        for each in wanted:
            plain = each if parts else each.partition("[")[0]
            here = {layer for layer in known if layer == plain or layer.startswith((f"{plain}.", f"{plain}["))}
            if not here:
                listed = ", ".join(f"`{layer}`" for layer in known)[:1000]
                raise UsageError(
                    f"`influence.groups` names `{each}` in `{name}`, of which no layer is a part; there are {listed}",
                    pointer=_POINTER,
                )
            own |= here
        found[f"{ALL}.{name}"] = frozenset(own)
    return found


def require_whole_layers(groups: Mapping[str, frozenset[str]], layers: Iterable[TreatedLayer]) -> None:
    """Refuse a group that holds a part of a layer: rows are seen of the whole layer.

    Args:
        groups: Names of parts, by group.

    Raises:
        UsageError: If one is divided.
    """
    for layer in layers:
        for name, own in groups.items():
            here = own.intersection(layer.parts)
            if here and len(here) < len(layer.parts):
                raise UsageError(
                    f"`influence.groups` names a part of layer `{layer.name}` in `{name.removeprefix(f'{ALL}.')}`, and "
                    f"scores are of whole layers; name `{layer.name}`",
                    pointer=_POINTER,
                )
