"""A caller frame: one call in the code of a factory, by names and a number alone."""

from catalog.record import record


@record
class CallerFrame:
    """One call in a factory's own code, under which the job failed."""

    module: str
    """Name of the module."""
    line: int
    """Line of the module's file."""
    function: str
    """Qualified name of the function."""
