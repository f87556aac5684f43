"""The list of the sentences of errors, on a source of its own."""

import ast
from textwrap import dedent

from ops.list_sentences import sentences


def test_sentences_of_errors_are_listed_with_their_holes() -> None:
    source = """
        class Refused(ValueError):
            def __init__(self, text):
                message = f"refused: {text}"
                super().__init__(message)

        def read(value):
            print("not an error")
            if value < 0:
                raise Refused(f"must be 0 or more (got {value}); " + ("give 1" if value else "leave it out"))
            _refuse("value", "a whole number", value)
    """
    assert sentences([ast.parse(dedent(source))]) == {
        "refused: {}", "must be 0 or more (got {}); ", "give 1", "leave it out", "a whole number",
    }  # fmt: skip
