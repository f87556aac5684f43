"""The signature: what ran in a forward pass, by the nodes of its autograd graph and the calls of its layers.

A branch that the data decide calls other layers, or leaves other nodes or the same ones in another order.
"""

import hashlib
from itertools import islice

from torch import Tensor

_MOST_NODES = 2**14
"""Nodes that are looked at, from the outputs back."""


def graph_signature(outputs: Tensor) -> tuple[str, int]:
    """Return a digest of the types and the order of the nodes that outputs come from.

    Args:
        outputs: The outputs of a forward pass, of any shape.

    Returns:
        A digest that is the same in every process, empty for outputs without a graph, and the number of nodes.
    """
    root = outputs.grad_fn
    if root is None:
        return "", 0
    numbers, order, parts = {root: 0}, [root], []
    for node in islice(order, _MOST_NODES):
        parts.append(node.name())
        for following, _ in node.next_functions:
            if following is None:
                parts.append("-")
                continue
            number = numbers.get(following)
            if number is None:
                number = numbers[following] = len(order)
                # the list grows while it is walked
                order.append(following)
            parts.append(str(number))
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).hexdigest(), len(order)
