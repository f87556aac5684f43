"""Killed attempts: what one leaves on the disk at every moment, and what a later one makes of it.

Only files survive a SIGKILL. So a copy of the scratch folder at a moment is what a kill at that moment would leave, and
one undisturbed attempt gives all of them: at every batch, and after every single file that was written or removed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.collect import collect_or_read
from engine.distributed.group import Ranks
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import Factors, digest
from engine.memory.plan import Chosen
from engine.workspace import Workspace
from tests.oracles import workspace
from worker.execution.files.artifact_files import ArtifactFiles

BATCH, BATCHES = 4, 4
WAYS = ("missing", "cut", "flipped")
ALONE = Ranks.alone()
PARTS = (("first",), ("left", "right"), ("head", "norm"))


class Tiny(nn.Module):
    """Two layers that share their input, a normalisation, and a buffer that moves."""

    def __init__(self, *, draws: bool = False, writes: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 5), nn.LayerNorm(5)
        self.left, self.right, self.head = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)
        self.draws, self.writes = draws, writes
        self.register_buffer("moved", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            # so that the dry run leaves it alone
            self.moved += 1
        hidden = torch.tanh(self.first(x))
        if self.draws:
            hidden = hidden + 0.1 * torch.rand(5, dtype=x.dtype)
        hidden = self.norm(hidden)
        joined = self.left(hidden) * self.right(hidden)
        if self.writes and bool((x > 9).any()):
            # in one batch alone an input is written over once it was read
            joined = joined + hidden.mul_(1.0).sum() * 0
        return self.head(torch.tanh(joined) * (1 + self.moved / 64))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Tiny,
    "draws": lambda: Tiny(draws=True),
    "writes": lambda: Tiny(writes=True),
}
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "ekfac": {"ekfac": True, "ema_decay": 0.5}}


@dataclass(frozen=True)
class Setting:
    """One collection, however often it is attempted."""

    model: str = "plain"
    kind: str = "plain"
    passes: int = 1
    ignored: bool = False
    """The first batch of each rank has no loss term."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.model}-{self.kind}-{self.passes}"

    def data(self, rank: int, size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The batches of one rank, with the numbers of their examples; the first has no loss term where asked for."""
        generator = torch.Generator().manual_seed(1)
        count = BATCHES * size
        x = torch.randn(count, BATCH, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (count, BATCH), generator=generator)
        # in the last batch but one of each rank
        x[-2 * size : -size, 1, 2] = 10.0
        if self.ignored:
            y[:size] = -100
        index = torch.arange(count * BATCH).view(count, BATCH)
        return [(x[each], y[each], index[each]) for each in range(rank, count, size)]

    def space(self, ranks: Ranks = ALONE) -> Workspace:
        torch.manual_seed(0)
        options: dict[str, Any] = {"fisher": "mc", "batch_size": BATCH, "exact_trace": True, "self_check": "growing"}
        options |= {**KINDS[self.kind], **self.options}
        data = self.data(ranks.rank, ranks.size)
        made = workspace(MODELS[self.model]().to(torch.float64), data, "classification", **options)
        made.options.kinds, made.inputs.examples, made.machine.ranks = ("factors",), BATCH * BATCHES, ranks
        if self.passes > 1:
            made.resume.chosen = Chosen(parts=PARTS, corrections=PARTS)
        return made

    def attempt(self, folder: Path, ranks: Ranks = ALONE, moments: "Moments | None" = None) -> "Attempt":
        """Collect with the checkpoint in a folder; ``moments`` looks at every batch and after every file."""
        made = self.space(ranks)
        made.ports.scratch = Watched(folder, None if moments is None else moments.look)
        made.resume.checkpoint_seconds = 1e-9
        if moments is not None:
            made.ports.raise_if_cancelled = partial(moments.look, batch=True)
        lines: list[str] = []
        made.ports.log = lambda level, message: lines.append(f"{level}: {message}")
        return Attempt(outcome(collect_or_read(made)), lines)

    def undisturbed(self, ranks: Ranks = ALONE, folder: Path | None = None) -> dict[str, str]:
        """The outcome without a checkpoint; several passes still put their factors into the folder."""
        return outcome(self.collected(folder, ranks))

    def collected(self, folder: Path | None = None, ranks: Ranks = ALONE) -> FactorSet:
        made = self.space(ranks)
        if folder is not None:
            made.ports.scratch = Watched(folder, None)
        return collect_or_read(made)


@dataclass(frozen=True)
class Attempt:
    """The outcome of one attempt, and its log."""

    found: dict[str, str]
    lines: list[str]

    @property
    def way(self) -> str:
        """Whether the attempt went on from a checkpoint, discarded one, or found none."""
        for word in ("discarded", "resumed"):
            if any(word in line for line in self.lines):
                return word
        return "anew"


class Watched(ArtifactFiles):
    """A folder of files; somebody looks at it after each that is written or removed."""

    def __init__(self, folder: Path, look: Callable[[], None] | None) -> None:
        super().__init__(folder, None)
        self._look = look or (lambda: None)

    def save_tensors(self, name: str, tensors: Any, metadata: Any) -> None:
        super().save_tensors(name, tensors, metadata)
        self._look()

    def save_json(self, name: str, value: object) -> None:
        super().save_json(name, value)
        self._look()

    def remove(self, name: str) -> None:
        super().remove(name)
        self._look()


def outcome(whole: FactorSet) -> dict[str, str]:
    """Everything that a collection has found, as one SHA-256 of each layer and one of what is not any layer's."""
    found = {"": hashed([asdict(row) for row in whole.declared], whole.examples, whole.updates, whole.passes,
                        whole.loss_scale, whole.nondeterministic, whole.trainable_parameters, whole.micro_batch,
                        None if whole.counted is None else asdict(whole.counted),
                        None if whole.entered is None else asdict(whole.entered),
                        [each.eighths for each in whole.nested], [each.examples for each in whole.nested])}  # fmt: skip
    for facts in whole.layers:
        own = whole.owners is None or whole.owners.get(facts.ordinal) is None
        entries: list[Any] = [asdict(facts)]
        if own:
            entries.append(tensors(whole.load(facts.ordinal)))
            for size in whole.nested:
                sums = size.sums[facts.ordinal]
                entries.append([tensors(size.load(facts.ordinal)), None if sums is None else asdict(sums)])
        if whole.load_corrected is not None:
            corrected = whole.load_corrected(facts.ordinal)
            entries.append([None if each is None else digest(each) for each in vars(corrected).values()])
        found[facts.name] = hashed(*entries)
    return found


def tensors(factors: Factors) -> list[Any]:
    tied = {} if factors.tied is None else factors.tied.stored()
    held = [factors.A, factors.G, factors.head_diagonal, *tied.values()]
    return [factors.scale_A, factors.scale_G, *(None if each is None else digest(each) for each in held)]


def hashed(*entries: Any) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


class Moments:
    """Copies of a folder at every moment of an attempt, links where a file is the same."""

    def __init__(self, folder: Path, kept: Path) -> None:
        folder.mkdir(parents=True)
        kept.mkdir()
        self.folder, self._kept = folder, kept
        self.count = 0
        self.batches: list[int] = []
        """The moments at which a batch begins."""

    @classmethod
    def of(cls, kept: Path) -> "Moments":
        """Those that another process has kept."""
        found = cls.__new__(cls)
        found._kept, found.batches = kept, json.loads((kept / "batches").read_text())
        return found

    def look(self, *, batch: bool = False) -> None:
        """Keep a copy of the folder as it is now."""
        if batch:
            self.batches.append(self.count)
            (self._kept / "batches").write_text(json.dumps(self.batches))
        link(self.folder, self._kept / str(self.count))
        self.count += 1

    def left(self, moment: int) -> Path:
        """What a kill at a moment leaves."""
        return self._kept / str(moment)


def link(source: Path, target: Path) -> None:
    """Copy a folder of files that nobody changes in place."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            os.link(path, place)


def harms(folder: Path) -> Iterator[tuple[str, str]]:
    """Every file with every way of harming it, by its name and the word for that."""
    yield "", "intact"
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        for way in WAYS:
            yield path.relative_to(folder).as_posix(), way


def harm(folder: Path, name: str, way: str) -> None:
    """Harm one file; it is a link, so its bytes are written anew."""
    if way == "intact":
        return
    path = folder / name
    content = bytearray(path.read_bytes())
    path.unlink()
    if way == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif way == "flipped":
        # what lies at the end of a file of tensors is a number of the last one
        content[-3] ^= 0x10
        path.write_bytes(content)


def killed(setting: Setting, left: Path, folder: Path, harmed: tuple[str, str], ranks: Ranks = ALONE) -> Attempt:
    """The attempt after one that was killed, on what that has left."""
    shutil.rmtree(folder, ignore_errors=True)
    link(left, folder)
    harm(folder, *harmed)
    return setting.attempt(folder, ranks)
