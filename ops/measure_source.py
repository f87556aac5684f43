"""Measure the source: lines of code and of docstrings, entries and first words that say nothing, functions said twice.

    python ops/measure_source.py [CHECKOUT] [--check | --list pairs]

All are counted in the product's folders alone.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("api", "catalog", "engine", "jobs", "kronoscope", "migrations", "worker")
_SAYS_NOTHING = re.compile("an?|the|of|its?|this|that|to|for|in|on|is|are|which|with|by|as|be|and|or")
_ENTRY = re.compile(r"^(?P<indent> +)(?P<name>\*{0,2}\w+): (?P<text>.*)$")
_FIGURES = re.compile(r"[0-9<>=()`]")
_SHINGLE, _LEAST_TOKENS, _ALIKE = 5, 40, 0.8
_COMMON = 50
_LEAST_PREFIX = 4
_ARTICLES, _FIRST_WORDS = ("a", "an", "the", "of"), 3


@dataclass
class Module:
    """A source file and its tree."""

    path: str
    text: str
    tree: ast.Module


def modules(checkout: Path) -> Iterator[Module]:
    """Yield the product's modules.

    Args:
        checkout: A folder that holds the project.
    """
    for folder in FOLDERS:
        for path in sorted((checkout / folder).rglob("*.py")):
            text = path.read_text()
            yield Module(str(path.relative_to(checkout)), text, ast.parse(text))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of docstrings: of modules, classes, functions and fields."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_lines(module: Module, docstrings: set[int]) -> int:
    """Return the number of lines that hold code."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in silent:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def _words(text: str) -> list[str]:
    parted = re.sub(r"([a-z])([A-Z])", r"\1 \2", text.replace("_", " "))
    return [each.lower() for each in re.findall(r"[A-Za-z]+", parted)]


def _same(one: str, other: str) -> bool:
    """Whether two words have one stem."""
    if one == other:
        return True
    shorter, longer = sorted((one, other), key=len)
    stem = shorter.removesuffix("s").removesuffix("e").removesuffix("y")
    return len(stem) >= _LEAST_PREFIX - 1 and longer.startswith(stem)


def args_entries(module: Module) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the entries of all sections `Args`: the function, the name, the text, and whether it adds nothing.

    An entry adds nothing where it is of words alone, each of which stands in the name or the type already.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if "\nArgs:\n" not in text:
                continue
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
            types = {each.arg: ast.unparse(each.annotation) for each in given if each and each.annotation}
            for name, said in _entries(text.partition("\nArgs:\n")[2]):
                known = _words(name) + _words(types.get(name.lstrip("*"), ""))
                words = [each for each in _words(said) if not _SAYS_NOTHING.fullmatch(each)]
                empty = (
                    said.isascii()
                    and not _FIGURES.search(said)
                    and all(any(_same(word, other) for other in known) for word in words)
                )
                yield f"{module.path}:{node.lineno} {node.name}", name, said, empty


def _entries(section: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    indent = None
    for line in section.splitlines():
        if not line.strip():
            break
        entry = _ENTRY.match(line)
        if entry and (indent is None or entry["indent"] == indent):
            indent = entry["indent"]
            found.append((entry["name"], entry["text"]))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
    return found


def begins_with_its_name(module: Module) -> bool | None:
    """Whether a word of its name is among the first three of a docstring; None for a module without either."""
    text, name = ast.get_docstring(module.tree), Path(module.path).stem
    if not text or name.startswith("__") or module.path.startswith("migrations/versions"):
        return None
    first = [each for each in _words(text.partition("\n")[0]) if each not in _ARTICLES][:_FIRST_WORDS]
    return any(_same(word, other) for word in first for other in _words(name))


class _Nameless(ast.NodeTransformer):
    """Takes a function's names and docstring away, so that copies with other names look the same."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("n", node.ctx)

    def visit_arg(self, _: ast.arg) -> ast.AST:
        return ast.arg("n")


def _shingles(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Counter[tuple[str, ...]] | None:
    body = node.body[1:] if ast.get_docstring(node) else node.body
    copy = _Nameless().visit(ast.parse(ast.unparse(ast.Module(body, []))))
    tokens = re.findall(r"\w+|[^\w\s]", ast.unparse(copy))
    if len(tokens) < _LEAST_TOKENS:
        return None
    return Counter(tuple(tokens[start : start + _SHINGLE]) for start in range(len(tokens) - _SHINGLE + 1))


def near_identical(found: list[Module]) -> list[tuple[float, str, str]]:
    """Return pairs of functions of 40 tokens or more that share four fifths of their sequences of five tokens."""
    shingles: dict[str, Counter[tuple[str, ...]]] = {}
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (parts := _shingles(node)) is not None:
                shingles[f"{module.path}:{node.lineno} {node.name}"] = parts
    holders: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, parts in shingles.items():
        for part in parts:
            holders[part].append(name)
    met = Counter(
        pair
        for names in holders.values()
        if len(names) < max(_COMMON, len(shingles) // 10)
        for index, one in enumerate(names)
        for pair in ((one, other) for other in names[index + 1 :])
    )
    pairs = []
    for (one, other), shared in met.items():
        first, second = shingles[one], shingles[other]
        if shared >= _ALIKE * max(len(first), len(second)) / 2:
            alike = (first & second).total() / (first | second).total()
            if alike >= _ALIKE:
                pairs.append((round(alike, 3), one, other))
    return sorted(pairs, reverse=True)


def measure_source(checkout: Path) -> dict[str, dict[str, int]]:
    """Return the figures of each folder, and of all.

    Args:
        checkout: A folder that holds the project.
    """
    found = list(modules(checkout))
    figures: dict[str, Counter[str]] = defaultdict(Counter)
    for module in found:
        docstrings = docstring_lines(module.tree)
        entries = list(args_entries(module))
        named = begins_with_its_name(module)
        counted = {
            "files": 1,
            "lines": len(module.text.splitlines()),
            "code": code_lines(module, docstrings),
            "docstrings": len(docstrings),
            "args": len(entries),
            "empty_args": sum(empty for *_, empty in entries),
            "modules_named": int(named is not None),
            "first_word_not_name": int(named is False),
        }
        for folder in (module.path.partition("/")[0], "all"):
            figures[folder].update(counted)
    figures["all"]["near_identical_pairs"] = len(near_identical(found))
    return {folder: dict(each) for folder, each in figures.items()}


def empty_entries(checkout: Path) -> list[str]:
    """Return the entries of `Args` that add nothing to name and type, each as a sentence with its remedy."""
    return [
        f"{place}: the entry {name!r} ({said!r}) says what name and type say; leave it out"
        for module in modules(checkout)
        for place, name, said, empty in args_entries(module)
        if empty
    ]


def other_first_words(checkout: Path) -> list[str]:
    """Return the modules whose docstring begins with something else than their name, each as a sentence."""
    return [
        f"{module.path}: its docstring begins with none of its name's words: {said!r}"
        for module in modules(checkout)
        if begins_with_its_name(module) is False
        for said in [(ast.get_docstring(module.tree) or "").partition("\n")[0]]
    ]


def main() -> int:
    """Print the figures, or what is counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", default=Path())
    parser.add_argument("--list", choices=("pairs",), help="print them in place of the figures")
    parser.add_argument("--check", action="store_true", help="fail where an entry or a first word says nothing")
    chosen = parser.parse_args()
    checkout = chosen.checkout.resolve()
    if chosen.check:
        lines = [*empty_entries(checkout), *other_first_words(checkout)]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        return 1 if lines else 0
    if chosen.list:
        lines = [f"{alike} {one} = {other}" for alike, one, other in near_identical(list(modules(checkout)))]
    else:
        lines = [json.dumps(measure_source(checkout), indent=1)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
