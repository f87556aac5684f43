"""How a wheel is built: the checkout's folders become packages of one, ``kronoscope``.

A checkout and the images keep ``api``, ``engine`` and the others side by side. Installed that way they would take
seven common names of everybody's environment. In a wheel they lie below ``kronoscope``; their imports, and the
modules that they name in strings, are rewritten while it is built. ``pip install -e`` leaves everything as it is.
"""

import io
import re
import shutil
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT_PACKAGE = "kronoscope"
MOVED = ("api", "catalog", "engine", "jobs", "migrations", "worker")
_IN_TEXT = re.compile(rf"(?<=-m )(?={'|'.join(MOVED)})\b")
_NAMED = re.compile(rf"((?:{'|'.join(MOVED)})(?:\.\w+)+|(?:{'|'.join(MOVED)})(?=:))(?::\w*)?")
_BLANK = {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


class OnePackage(BuildHookInterface[Any]):
    """Hatchling's hook: rewrites the folders into a temporary one, and has that packed."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Rewrite what a wheel will hold; an editable install needs nothing.

        Args:
            version: `standard` or `editable`, as hatchling says it.
            build_data: What hatchling packs; the rewritten files are added.
        """
        if version == "editable":
            return
        self._built = tempfile.mkdtemp()
        for source, packed in rewrite_tree(Path(self.root), Path(self._built)):
            build_data["force_include"][str(source)] = packed

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the rewritten files once they are packed.

        Args:
            version: `standard` or `editable`.
            build_data: What hatchling packed.
            artifact_path: The wheel.
        """
        if version != "editable":
            shutil.rmtree(self._built, ignore_errors=True)


def rewrite_tree(root: Path, built: Path) -> Iterator[tuple[Path, str]]:
    """Rewrite every module of a checkout, and copy what is no module.

    Args:
        root: The checkout.
        built: Folder for the rewritten files.

    Yields:
        A file, and its place in the wheel.
    """
    for folder in (ROOT_PACKAGE, *MOVED):
        for path in sorted((root / folder).rglob("*")):
            if not path.is_file() or "__pycache__" in path.parts:
                continue
            place = path.relative_to(root).as_posix()
            packed = place if folder == ROOT_PACKAGE else f"{ROOT_PACKAGE}/{place}"
            target = built / packed
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".py":
                target.write_text(rewrite(path.read_text(encoding="utf-8"), root), encoding="utf-8")
            else:
                shutil.copyfile(path, target)
            yield target, packed


def rewrite(source: str, root: Path) -> str:
    """Rewrite one module: its imports of the moved packages, and strings that are the name of one of their modules.

    Args:
        source: The module's source.
        root: The checkout, which tells whether a string such as `worker.foreground` names a module.

    Returns:
        The source for the wheel.

    Raises:
        ValueError: If it imports a moved package in a form that cannot be rewritten.
    """
    lines = source.splitlines(keepends=True)
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            edits.append((token.start, token.end, _string(token.string, root)))
        if token.type not in _BLANK:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            edits += _import(statement)
            statement = []
    for start, end, text in sorted(edits, reverse=True):
        _replace(lines, start, end, text)
    return "".join(lines)


def _import(statement: list[tokenize.TokenInfo]) -> list[tuple[tuple[int, int], tuple[int, int], str]]:
    """The edits of one statement, if it imports a moved package."""
    words = [token.string for token in statement]
    if len(words) < 2 or words[0] not in {"from", "import"} or words[1] not in MOVED:
        return []
    if words[0] == "import" and len(words) > 2 and words[2] != "as":
        raise ValueError(
            f"{statement[0].line.strip()!r}: import a module of this project as `from package import module`"
        )
    name = statement[1]
    bound = f" as {name.string}" if len(words) == 2 else ""
    return [(name.start, name.end, f"{ROOT_PACKAGE}.{name.string}{bound}")]


def _string(literal: str, root: Path) -> str:
    """A string literal, with the module that it names below the package."""
    prefix, quote, rest = re.fullmatch(r"""([a-zA-Z]*)(\"\"\"|'''|"|')(.*)""", literal, re.DOTALL).groups()  # type: ignore[union-attr]
    text = rest.removesuffix(quote)
    named = _NAMED.fullmatch(text)
    if named is not None:
        place = root.joinpath(*named[1].split("."))
        if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
            text = f"{ROOT_PACKAGE}.{text}"
    return f"{prefix}{quote}{_IN_TEXT.sub(f'{ROOT_PACKAGE}.', text)}{quote}"


def _replace(lines: list[str], start: tuple[int, int], end: tuple[int, int], text: str) -> None:
    (first, from_column), (last, to_column) = start, end
    before, after = lines[first - 1][:from_column], lines[last - 1][to_column:]
    lines[first - 1 : last] = [before + text + after]
