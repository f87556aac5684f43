"""Digests of what a job computed from: the bytes of its model and of its data, or stored factors.

    model_sha256    names, dtypes, shapes and bytes of the parameters and buffers, in the order of the modules
    data_sha256     one whole pass over the data, in order: dtypes, shapes and bytes of its tensors
    factors_sha256  the names of the layers of stored factors, with the digests of A and G
    against_sha256  the same of the factors that those are compared with

None of them depends on the attempt, the device or the plan: a job that was killed and resumed has those of one that was
not.
A pass that a job makes anyway is read as it passes by. Where an attempt makes none to its end, as when an earlier
attempt has collected everything, one is made for the digest.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from engine.artifacts import Artifacts
from engine.factors.factor_index import INDEX, read_index
from engine.tensor_file import tensor_bytes
from worker.execution.data.stream import Chunk
from worker.execution.factor_cache import Witness, data_digest


class InputDigests:
    """The digests of one job's model and data; `stream` takes the place of the data."""

    def __init__(self, model: nn.Module, batches: Callable[[], Iterator[Chunk]], seed: int) -> None:
        self.model_sha256 = weights_digest(model)
        self.examples: int | None = None
        """Examples of a whole pass; None before there was one."""
        self.stream = Witness(self._counted)
        self._batches = batches
        self._seed = seed
        self._data: str | None = None

    def data_sha256(self, checkpoint: Callable[[], None]) -> str:
        """Return the digest of the first whole pass over the data; one is made where there was none."""
        if self._data is None:
            passes = self.stream.digests
            self._data = passes[0] if passes else data_digest(self._counted, self._seed, checkpoint)
        return self._data

    def _counted(self) -> Iterator[Chunk]:
        examples = 0
        for chunk in self._batches():
            examples += _examples(chunk[0])
            yield chunk
        self.examples = examples


def weights_digest(model: nn.Module) -> str:
    """Return the digest of a model's parameters and buffers, each once and in the order of the modules."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        head = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}".encode()
        # with its length, so that no name runs into the bytes before it
        digest.update(len(head).to_bytes(8, "little") + head)
        for part in tensor_bytes(tensor.detach().to_dense() if tensor.layout != torch.strided else tensor):
            digest.update(part)
    return digest.hexdigest()


def factors_digest(stored: Artifacts | None) -> str | None:
    """Return the digest of stored factors, as their index records them."""
    return None if stored is None else read_index(stored.load_json(INDEX)).sha256()


def composed_digest(digests: Iterable[str | None]) -> str:
    """Return the digest of data that were read in parts."""
    return hashlib.sha256("".join(f"{each}\n" for each in digests).encode()).hexdigest()


def _examples(inputs: Any) -> int:  # noqa: ANN401 - a tensor, or any tree of tensors
    """The first extent of the first tensor: examples stand in the first dimension."""
    while not isinstance(inputs, torch.Tensor):
        if not isinstance(inputs, (Mapping, tuple, list)) or not inputs:
            return 0
        inputs = next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs))
    return int(inputs.shape[0]) if inputs.dim() else 0
