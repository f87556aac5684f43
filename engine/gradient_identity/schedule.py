"""Check work: how many examples a self-check runs, and what that takes."""

from dataclasses import dataclass

from engine.workspace import Workspace

FIRST_EXAMPLES = 4
"""Different examples of the first batch that are held against themselves alone."""
LATER_EXAMPLES = 2
"""Examples of a later batch that are run together; one of them is held against itself alone."""


@dataclass(frozen=True, kw_only=True)
class CheckWork:
    """The work of the checks of one collection, in passes there and back."""

    examples: float
    """Examples that go there and back, weight gradients counted."""
    passes: int
    """Passes, of few examples each."""


def check_work(workspace: Workspace, batches: int) -> CheckWork:
    """Count the work of the checks of one collection.

    The first check runs four examples together twice, and each of them alone twice, once with the
    gradients of the weights; a later one runs two together and one alone, twice.

    Args:
        workspace: The job, whose ``self_check`` says which batches are checked.
        batches: Batches of the data, whose shapes are taken to be alike.

    Returns:
        Examples and passes of all checks; zero where nothing is checked.
    """
    collection = workspace.options.collection
    if collection.self_check == "off":
        return CheckWork(examples=0.0, passes=0)
    first = min(FIRST_EXAMPLES, collection.batch_size)
    weighed = 4 / 3
    examples, passes = first * (3 + weighed), 2 + 2 * first
    if collection.self_check == "growing":
        later = (batches - 1).bit_length()
        examples += later * (LATER_EXAMPLES + 1 + weighed)
        passes += 3 * later
    return CheckWork(examples=examples, passes=passes)
