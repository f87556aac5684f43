"""The mutations of formulas: each changes one operation and nothing else, and a seed draws the same ones again."""

import ast
from pathlib import Path

import pytest

from ops.mutate_formulas import EQUIVALENT, draw, mutations_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("G @ A", "A @ G"),
        ("G.T", "G"),
        ("total / count", "total"),
        ("scale * total", "scale"),
        ("total + damping", "total - damping"),
        ("total - damping", "total + damping"),
        ("x ** 2", "x ** (2 + 1)"),
    ],
)
def test_an_operation_becomes_another(before: str, after: str) -> None:
    source = f"def formula():\n    σ = 1\n    return σ, {before}  # ü\n"
    (mutation,) = mutations_of("engine/linalg/formula.py", source)
    assert (mutation.before, mutation.after, mutation.line) == (before, after, 3)
    assert mutation.applied(source) == source.replace(before, f"({after})")
    assert mutation.tests == "tests/engine/linalg"


@pytest.mark.parametrize(
    "expression", ['"a" + name', 'f"{a}" * 2', "[1] * n", "(1,) + rest", "a // b", "a | b", "f(a)"]
)
def test_texts_and_sequences_are_no_formulas(expression: str) -> None:
    assert mutations_of("engine/linalg/formula.py", f"x = {expression}\n") == []


def test_a_seed_draws_the_same_mutations_of_different_modules() -> None:
    drawn = list(draw(ROOT, 1, 12))
    assert drawn == list(draw(ROOT, 1, 12)) != list(draw(ROOT, 2, 12))
    assert len({each.module for each in drawn}) == 12
    assert not {each.name for each in drawn} & set(EQUIVALENT)
    for each in drawn:
        source = (ROOT / each.module).read_text()
        assert ast.unparse(ast.parse(source[each.begin : each.end].strip(), mode="eval")) == each.before
        ast.parse(each.applied(source))
        assert (ROOT / each.tests).is_dir()
