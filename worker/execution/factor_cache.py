"""The factor cache of a child: ask the parent for an entry by its key, or leave one of the factors that were collected.

The parent has verified what it lays out, where no job can write. What is left is written into the attempt's own
folder, and becomes an entry when the parent has copied it. Neither looking nor leaving ever fails a job.

The key is a digest of everything that the factors' bits depend on. A wrong hit would be a wrong result without a word,
so whatever cannot be identified has no key, and is collected: models from a factory or with hooks (any code may be
behind them), and nested sizes. Factors of a head that was sketched for want of memory are not found either: they are
never kept. Weights, buffers and data enter by their bytes, the data as they come.
"""

import hashlib
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import catalog
import engine
import worker
from catalog.frame_bounds import CACHED_FILES
from catalog.frames import CacheAnswer, CacheAsked, CacheFilled
from catalog.record import canonical_json, plain
from catalog.requests.cached_factors import CachedFile, reason_uncached
from catalog.requests.job import JobDocument
from engine.artifacts import Artifacts
from engine.distributed.group import Ranks
from engine.model.determinism import Numerics
from engine.model.state.generators import seed_generators
from engine.tensor_file import tensor_bytes
from worker.disk.cache_folder import LEAST_FREE_SHARE
from worker.disk.free_space import free_share
from worker.execution.computing_environment import computing_environment
from worker.execution.data.stream import Chunk
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.frame_pipe import FramePipe
from worker.execution.ranks.rank_part import NoFiles

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
            seed_generators(seed)
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


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """The use that one job makes of its tenant's cache."""

    key: str
    """The key of its collection, as `factor_key` returns it."""
    view: Path
    """The folder in which the parent lays out the files of an entry."""
    filled: Path
    """The folder of the attempt for the files of an entry to be."""
    refresh: bool
    """Whether the factors are collected in any case, and replace those of an earlier entry."""
    ask: Callable[[str], CacheAnswer]
    """Asks the parent for the entry of a key; every rank gets the same answer."""
    tell: Callable[[CacheFilled], None]
    """Tells the parent what was left for it."""
    fills: bool = True
    """Whether what is collected becomes an entry: of several ranks, which hold the same factors, one leaves it."""
    agree: Callable[[bool], bool] = bool
    """Returns whether every rank has found the entry: one that collects waits for all others."""


class FactorCache:
    """The entry of one collection among a tenant's cached factors, to be found or to be left."""

    def __init__(
        self,
        use: CacheUse,
        *,
        limit_bytes: int,
        unchanged: Callable[[], bool],
        log: Callable[[str, str], None],
    ) -> None:
        """Set up the cache; nothing is asked yet."""
        self._use = use
        self._limit_bytes = limit_bytes
        self._unchanged = unchanged
        self._log = log
        self._shelf: _Shelf | None = None

    def find(self) -> tuple[Artifacts, str] | None:
        """Ask for the entry of the key."""
        if self._use.refresh:
            return None
        answer = self._use.ask(self._use.key)
        if answer.warning is not None:
            self._log("warning", answer.warning)
        is_there = answer.job is not None and self._use.view.is_dir()
        if not self._use.agree(is_there) or not is_there:
            return None
        found = f"{answer.job}, key {self._use.key}"
        self._log("info", f"factors from the cache of job {found}: nothing is collected")
        return ArtifactFiles(self._use.view, None), found

    def shelf(self) -> Artifacts:
        """Return the folder for factors that are being collected; ``keep`` leaves it to the parent."""
        if not self._use.fills:
            return NoFiles()
        if self._shelf is None:
            self._shelf = _Shelf(self._use.filled, self._limit_bytes, self._log)
        return self._shelf

    def keep(self) -> None:
        """Leave what was written as the entry of the key, if all of it was, and the data came as the key says."""
        shelf = self._shelf
        if shelf is None or shelf.failed:
            return
        why = None
        if not self._unchanged():
            why = "the data are others in each pass"
        elif len(shelf.files) > CACHED_FILES:
            why = f"an entry has at most {CACHED_FILES:,} files"
        if why is not None:
            self._log("info", f"factors are not cached: {why}")
            self.close()
            return
        # no longer this process's to remove
        self._shelf = None
        self._use.tell(CacheFilled(key=self._use.key, files=tuple(shelf.files.values())))

    def close(self) -> None:
        """Remove what was written and is not in use: of a job that stops or fails, nothing stays."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            shelf.close()


def ask_parent(pipe: FramePipe, ranks: Ranks, checkpoint: Callable[[], None]) -> Callable[[str], CacheAnswer]:
    """Return what asks the parent for an entry: of several ranks rank 0 does, and tells the others."""

    def ask(key: str) -> CacheAnswer:
        own = pipe.ask(CacheAsked(key=key), checkpoint) if ranks.rank == 0 else None
        told = ranks.gather((key, own), "answers of the cache")
        answer: CacheAnswer = told[0][1]
        # ranks with a part of the model each have keys of their own, and no entry
        return answer if all(each == key for each, _ in told) else CacheAnswer(job=None)

    return ask


class _Shelf(ArtifactFiles):
    """Files of an entry to be; the first that cannot be written ends it."""

    def __init__(self, place: Path, limit_bytes: int, log: Callable[[str, str], None]) -> None:
        self.files: dict[str, CachedFile] = {}
        self.failed = False
        self._place = place
        self._limit_bytes = limit_bytes
        self._log = log
        super().__init__(place, self._note)

    def close(self) -> None:
        """Remove what stands there."""
        shutil.rmtree(self._place, ignore_errors=True)

    def _note(self, name: str, sha256: str, size_bytes: int, media_type: str) -> None:
        del media_type
        self.files[name] = CachedFile(name=name, sha256=sha256, size_bytes=size_bytes)

    def _write(self, name: str, parts: Iterable[bytes], media_type: str) -> None:
        if self.failed:
            return
        if free_share(self._place) < LEAST_FREE_SHARE:
            self._give_up(f"less than {LEAST_FREE_SHARE:.0%} of the disk is free, which results may need")
            return
        try:
            super()._write(name, parts, media_type)
        except OSError as error:
            self._give_up(f"the cache refused a write: {error.strerror or error}")
            return
        if sum(each.size_bytes for each in self.files.values()) > self._limit_bytes:
            self._give_up(f"they take more than the cache's {self._limit_bytes:,} bytes")

    def _give_up(self, why: str) -> None:
        self.failed = True
        self._log("warning", f"factors are not cached: {why}")
        self.close()
