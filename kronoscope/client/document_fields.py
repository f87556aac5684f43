"""Document fields by their paths, such as `collection.batch_size`."""

from typing import Any


def set_field(document: dict[str, Any], path: str, value: Any) -> None:  # noqa: ANN401 - whatever JSON holds
    """Set one field of a document in place, by names with dots between them, and make the blocks that lead to it.

    ``ValueError`` if a name is empty, or a step of the path is a value and no block.
    """
    steps = path.strip().split(".")
    if not all(steps):
        raise ValueError(f"`{path}` is not the path of a field; write it as `collection.batch_size`")
    here = document
    for depth, step in enumerate(steps[:-1], start=1):
        below = here.setdefault(step, {})
        if below is None:
            below = here[step] = {}
        if not isinstance(below, dict):
            raise ValueError(f"`{'.'.join(steps[:depth])}` is a value, not a block")  # noqa: TRY004 - the path is at fault
        here = below
    here[steps[-1]] = value
