"""Random keys: a generator for each counter of a key, so that a draw does not depend on those before it."""

import hashlib

import torch

_STATES = 2**32


def keyed_generator(key: str, counter: int) -> torch.Generator:
    """Make the generator of a counter, on the host.

    Torch's generator there has 2³² starting states, so counters of one key never share one as long as they differ by
    less; two keys may, by chance.

    Args:
        key: The draws' name, with the seed in it.
        counter: Such as the number of an episode.
    """
    first = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    return torch.Generator().manual_seed((first + counter) % _STATES)
