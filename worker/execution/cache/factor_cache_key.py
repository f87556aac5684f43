"""The key of a collection: a digest of everything that its factors' bits depend on.

A wrong hit would be a wrong result without a word, so whatever cannot be identified has no key, and is collected:
models from a factory or with hooks (any code may be behind them), and nested sizes. Factors of a head that was sketched
for want of memory are not found either: they are never kept. Weights, buffers and data enter by their bytes, the
data as they come.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import catalog
import engine
import worker
from catalog.record import canonical_json, plain
from catalog.requests.cached_factors import reason_uncached
from catalog.requests.job import JobDocument
from engine.model.determinism import Numerics
from engine.tensor_file import tensor_bytes
from worker.execution.computing_environment import computing_environment
from worker.execution.data.stream import Chunk

_KNOWN_CODE = ("torch.", "transformers.", f"{worker.__name__}.")
"""Packages whose modules are identified by their version, or by the digest of their source."""
_PLAIN = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Witness:
    """A stream of data that notes the digest of every pass that came to its end."""

    def __init__(self, batches: Callable[[], Iterator[Chunk]]) -> None:
        self._batches = batches
        self.digests: list[str] = []

    def __call__(self) -> Iterator[Chunk]:
        """Begin a pass."""
        digest = hashlib.sha256()
        for chunk in self._batches():
            enter_tree(digest, chunk)
            yield chunk
        self.digests.append(digest.hexdigest())


def data_digest(batches: Callable[[], Iterator[Chunk]], seed: int, checkpoint: Callable[[], None]) -> str:
    """Return the digest of one pass over the data; every generator of random numbers is as before afterwards."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - a caller's factory may use it
    witness = Witness(batches)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            # as a collection's pass begins
            torch.manual_seed(seed)
            for _ in witness():
                checkpoint()
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
    return witness.digests[0]


def reason_uncacheable(document: JobDocument, model: nn.Module) -> str | None:
    """Return why a collection cannot be cached."""
    why = reason_uncached(plain(document))
    if why is not None:
        return why
    for name, module in model.named_modules():
        if not type(module).__module__.startswith(_KNOWN_CODE):
            return f"the code of module `{name}` ({type(module).__name__}) is not known"
        if any(getattr(module, hooks, None) for hooks in _HOOKS) or "forward" in vars(module):
            return f"module `{name}` has hooks, or a forward of its own"
    return None


def factor_key(document: JobDocument, model: nn.Module, data: str, device: torch.device, ranks: int = 1) -> str:
    """Return the key of a collection: SHA-256 over model, data, options, code, numerics and the number of ranks."""
    value = {
        "model": model_digest(model),
        "data": data,
        "task": asdict(document.task) if document.task is not None else None,
        "collection": asdict(document.collection),
        "woodbury": asdict(document.woodbury),
        "memory": asdict(document.memory),
        "code": source_digest(),
        "environment": computing_environment(device),
        "build": torch.__config__.show(),
        "numerics": Numerics.here(device).recorded(),
        "ranks": ranks,
    }
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def model_digest(model: nn.Module) -> str:
    """Return a model's digest: architecture, weights and buffers with dtypes, shapes, strides, sharing, flags."""
    digest = hashlib.sha256()
    for name, module in model.named_modules(remove_duplicate=False):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        options = {key: _plain(value) for key, value in sorted(vars(module).items()) if not key.startswith("_")}
        _enter(digest, "module", name, kind, module.training, canonical_json(options), module.extra_repr())
        config: Any = getattr(module, "config", None)
        if callable(getattr(config, "to_dict", None)):
            _enter(digest, "config", repr(sorted(config.to_dict().items(), key=lambda item: str(item[0]))))
    seen: dict[int, str] = {}
    tensors: Iterator[tuple[str, Tensor]] = iter(
        [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    )
    for name, tensor in tensors:
        same = seen.setdefault(id(tensor), name)
        storage = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
        shared = seen.setdefault(-storage, name) if storage else name
        _enter(digest, "tensor", name, same, shared, tensor.requires_grad)
        if same == name:
            _enter_tensor(digest, tensor)
    return digest.hexdigest()


def source_digest() -> str:
    """SHA-256 over our own source: a version number stays the same while the code is worked on."""
    digest = hashlib.sha256()
    for place in (Path(catalog.__file__).parent, Path(engine.__file__).parent, Path(worker.__file__).parent):
        for path in sorted(place.rglob("*.py")):
            _enter(digest, path.relative_to(place.parent).as_posix())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a module keeps
    """Identify an attribute by its value where that is plain, else by its type."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, torch.dtype):
        return str(value)
    return f"{type(value).__module__}.{type(value).__qualname__} {getattr(value, '__qualname__', '')}"


def enter_tree(digest: Any, tree: Any) -> None:  # noqa: ANN401 - hashlib's type is not named; data are any tree
    """Add a tree of tensors to a digest: dtypes, shapes, strides and bytes."""
    if isinstance(tree, Tensor):
        _enter_tensor(digest, tree)
    elif isinstance(tree, Mapping):
        _enter(digest, "mapping", *map(str, tree))
        for value in tree.values():
            enter_tree(digest, value)
    elif isinstance(tree, (tuple, list)):
        _enter(digest, "sequence", len(tree))
        for value in tree:
            enter_tree(digest, value)
    else:
        _enter(digest, "value", type(tree).__qualname__, repr(tree))


def _enter_tensor(digest: Any, tensor: Tensor) -> None:  # noqa: ANN401
    _enter(digest, str(tensor.dtype), str(tensor.layout), *tensor.shape)
    if tensor.layout == torch.strided:
        # kernels are chosen by the order in memory
        _enter(digest, "strides", *tensor.stride())
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    for part in tensor_bytes(dense):
        digest.update(part)


def _enter(digest: Any, *values: object) -> None:  # noqa: ANN401
    """Each value with its length before it, so that no two lists of values run into one."""
    for value in values:
        text = str(value).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
