"""List the sentences of errors, or what differs from an earlier list, so that a change of code keeps its words.

    python -m ops.list_sentences [CHECKOUT] [--against FILE]

A sentence is a text of two words or more that an error is made with, at any depth of the call, or that a variable
`message` holds; `{}` stands for a value in it. Functions that refuse count as errors.
"""

import argparse
import ast
import builtins
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ops.measure_source import modules

_REFUSING = re.compile(r"_?(refuse|refusal|malformed|broken|unfit|problem)")
_BUILT_IN = {name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, Exception)}


def error_classes(trees: list[ast.Module]) -> set[str]:
    """Return the names of the classes that are errors, those of Python among them."""
    bases = {
        node.name: {_last_name(each) for each in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    errors = set(_BUILT_IN)
    while more := {name for name, parents in bases.items() if parents & errors} - errors:
        errors |= more
    return errors


def sentences(trees: list[ast.Module]) -> set[str]:
    """Return the sentences of errors in some modules."""
    errors = error_classes(trees)
    return {
        text
        for tree in trees
        for node in ast.walk(tree)
        if (isinstance(node, ast.Call) and ((name := _last_name(node.func)) in errors or _REFUSING.match(name)))
        or (isinstance(node, ast.Assign) and any(_last_name(each) == "message" for each in node.targets))
        for text in _texts(node)
        if len(text.split()) > 1
    }


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts below a node, with `{}` for each value of an f-string and the texts inside it on their own."""
    if isinstance(node, ast.Constant):
        yield from [node.value] if isinstance(node.value, str) else []
        return
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from _texts(child)


def main() -> int:
    """Write the sentences, or the difference from a stored list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--against", type=Path, metavar="FILE", help="a list that this command wrote before")
    options = parser.parse_args()
    now = sentences([module.tree for module in modules(options.checkout)])
    lines = [json.dumps(sorted(now), indent=1, ensure_ascii=False)]
    before = now
    if options.against is not None:
        before = set(json.loads(options.against.read_text()))
        lines = [f"- {text}" for text in sorted(before - now)] + [f"+ {text}" for text in sorted(now - before)]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return int(before != now)


if __name__ == "__main__":
    sys.exit(main())
