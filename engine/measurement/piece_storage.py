"""Piece storage: a piece of a divided job collects the factors of its examples and stores them, and measures nothing.

What the whole job measures is that of all examples together; the pieces' sums are merged first, and each layer is
decomposed once.
"""

from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.merging.part_files import write_part
from engine.workspace import Workspace


def store_piece(workspace: Workspace) -> FactorSet:
    """Collect the factors of a part of the data, and store them with all that a merge takes.

    Args:
        workspace: The job, whose ``inputs.part`` says which examples these are.

    Returns:
        The set over the part.

    Raises:
        EngineError: As ``engine.errors`` lists.
        ValueError: If the job is over the whole data.
    """
    if workspace.inputs.part is None:
        raise ValueError("a piece needs `inputs.part`: which examples it is over, and of which data")
    collected = collect_or_read(workspace)
    with workspace.machine.operation("piece", "collection"):
        write_part(workspace.ports.artifacts, collected)
    return collected
