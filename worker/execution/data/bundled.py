"""Bundled data, which every installation carries: scikit-learn's digits and Python's own documentation."""

import importlib
import importlib.util
import pydoc_data.topics
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TEST_EXAMPLES = 360
"""The digits that the builtin models never train on: the last fifth."""


def digits() -> tuple[Tensor, Tensor]:
    """1,797 images (N, 1, 8, 8) with values in [0, 1], and their classes."""
    table = torch.from_numpy(_table_of_digits())
    return table[:, :-1].to(torch.float32).view(-1, 1, 8, 8) / 16, table[:, -1].to(torch.int64)


def _table_of_digits() -> np.ndarray:
    """The 64 pixels and the class of each digit, shape (1797, 65), float64.

    ``load_digits`` reads the same file. To import it takes a second, for SciPy's statistics and pandas.
    """
    package = importlib.util.find_spec("sklearn")
    file = Path((package and package.origin) or "").with_name("datasets") / "data/digits.csv.gz"
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    # a version that keeps it elsewhere
    images, classes = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    return np.column_stack((images, classes))


def english_paragraphs() -> list[str]:
    """Paragraphs of Python's language reference, in a fixed order, each of at least 80 characters."""
    topics = pydoc_data.topics.topics
    found = []
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            text = " ".join(paragraph.split())
            if len(text) >= 80:
                found.append(text)
    return found


def english_bytes(length: int) -> Tensor:
    """Return the bundled text as rows of byte values that do not overlap.

    Args:
        length: Bytes in a row.

    Returns:
        Shape (N, length), int64, values 0 to 255.
    """
    text = "\n".join(english_paragraphs()).encode()
    rows = len(text) // length
    return torch.frombuffer(bytearray(text[: rows * length]), dtype=torch.uint8).to(torch.int64).view(rows, length)
