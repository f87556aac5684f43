"""A hook of mkdocs: links from a page to files of the repository outside `docs/` become plain text in the site."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!decisions/)[^)\s]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:  # noqa: ANN401 - mkdocs brings no types
    """Take the links out of one page.

    Args:
        markdown: The page's text.
        page: The page.

    Returns:
        The text, where a link that leads out of `docs/` is its words alone.
    """
    depth = page.file.src_uri.count("/")

    def plain(link: re.Match[str]) -> str:
        return link[1] if link[0].split("](")[1].count("../") > depth else link[0]

    return _OUTSIDE.sub(plain, markdown)
