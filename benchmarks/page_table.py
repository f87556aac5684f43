"""A table that a benchmark writes into a page, between marks that name it.

<!-- name: begin -->
…
<!-- name: end -->
"""

from collections.abc import Iterable
from pathlib import Path


def read_table(page: Path, name: str) -> str:
    """Return the table of that name, without the blank lines around it.

    Raises:
        ValueError: If the page lacks the marks.
    """
    return _split(page, name)[1].strip()


def write_table(page: Path, name: str, lines: Iterable[str]) -> None:
    """Write lines in place of the table of that name.

    Raises:
        ValueError: If the page lacks the marks.
    """
    before, _, after = _split(page, name)
    page.write_text(f"{before}\n\n" + "\n".join(lines) + f"\n\n{after}")


def _split(page: Path, name: str) -> tuple[str, str, str]:
    """Return the page up to the first mark and with it, the table, and the second mark with what follows."""
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    before, found, rest = page.read_text().partition(begin)
    table, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page.name} must have the marks {begin} and {end}, in this order")
    return before + begin, table, end + after
