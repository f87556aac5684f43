"""The data sets that every installation carries: scikit-learn's digits and Python's own documentation."""

import pydoc_data.topics

import sklearn.datasets
import torch
from torch import Tensor

TEST_EXAMPLES = 360
"""The digits that the builtin models never train on: the last fifth."""


def digits() -> tuple[Tensor, Tensor]:
    """1,797 images (N, 1, 8, 8) with values in [0, 1], and their classes."""
    loaded = sklearn.datasets.load_digits()
    images = torch.from_numpy(loaded.images).to(torch.float32).unsqueeze(1) / 16
    return images, torch.from_numpy(loaded.target).to(torch.int64)


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
