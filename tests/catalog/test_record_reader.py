"""Sentences of the reader of plain values."""

from typing import Literal

import pytest

from catalog.record import FieldError
from catalog.record_reader import Reader


def test_words_are_listed_in_the_order_of_their_declaration() -> None:
    for words, annotation in (("one, two", Literal["one", "two"]), ("two, one", Literal["two", "one"])):
        with pytest.raises(FieldError, match=rf"must be one of {words} \(got 3\)"):
            Reader().read(annotation, 3, "field")
