"""The attempt of a child: its assignment, its document, and the workspace that both are made into, without inputs."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from catalog import ANALYSES, DOCUMENT
from catalog.analyses.analysis import most_decomposed
from catalog.field_errors import complaints
from catalog.frames import AppliedAdapter, Reading, Started
from catalog.record import canonical_json, plain
from catalog.record_reader import read
from catalog.requests.assignment import Assignment
from catalog.requests.estimate import unplannable
from catalog.requests.job import JobDocument
from engine.analyses.spectra import search_checkpoints
from engine.artifacts import Artifacts
from engine.collection import checkpoints
from engine.distributed import group
from engine.errors import StopRequested
from engine.measurement import stored_decompositions
from engine.memory.budget import MemoryBudget, grow_segments, resident_bytes
from engine.memory.device_speed import DeviceSpeed, measure_speed
from engine.memory.guard import Guard
from engine.memory.memory_curve import MemoryCurve, StagePeaks
from engine.memory.plan import Chosen
from engine.workspace import JobOptions, Machine, ModelInputs, Ports, Resume, Workspace
from worker.execution.computing_environment import (
    computing_budget,
    computing_device,
    computing_environment,
    process_begun,
    seed_libraries,
    settle_numerics,
    settle_threads,
)
from worker.execution.failures import DocumentRefused
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.frame_pipe import FramePipe
from worker.execution.loader_context import LoaderContext
from worker.execution.pieces.extension import Extended, open_extended
from worker.execution.pieces.read_digests import ReadDigests
from worker.execution.ranks.rank_part import NoFiles, assignment_of_rank, bounds_of_plan
from worker.execution.refusal import Refusal

_SMALL_INPUT_BYTES = 256 * 2**20
_MOST_UNUSED = 500
_MOST_NOTICES = 50
MANIFESTS = (checkpoints.MANIFEST, *search_checkpoints.MANIFESTS)
"""The files that make others a checkpoint: of a collection, of a search for eigenvalues, and of a training."""
SCORED = "influence/"
"""The folder of scored queries, which a later attempt takes over beside a checkpoint."""
_MARKERS = f"bases/*{stored_decompositions.DEVICE_ASKED}"
_PART = ".part-"
_DOCUMENT: TypeAdapter[JobDocument] = TypeAdapter(DOCUMENT)


class ScratchFiles(ArtifactFiles):
    """The scratch place of an attempt, which reports each checkpoint as its last file is written."""

    def __init__(self, root: Path, keep: Callable[[], None]) -> None:
        # neither announced nor hashed: it is read by this job alone, and a checkpoint brings its own digests
        super().__init__(root, None)
        self._keep = keep

    @override
    def save_json(self, name: str, value: object) -> None:
        super().save_json(name, value)
        if name in MANIFESTS or (name.startswith(SCORED) and _holds_one(self._root)):
            self._keep()


class StopFlag:
    """A flag that SIGTERM sets, and that the computation reads before each unit of work."""

    def __init__(self) -> None:
        self._asked = False

    def install(self) -> None:
        """Handle SIGTERM, and ignore SIGINT: an interrupt from the keyboard is handled by the parent."""
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked = True

    def checkpoint(self) -> None:
        """Stop here if a signal has asked for it."""
        if self._asked:
            raise StopRequested


@dataclass(frozen=True)
class InputNotes:
    """Notes of the loaders on a model's folder and data, each line once and in order."""

    unused: dict[str, None] = field(default_factory=dict)
    """Names that were not used."""
    notices: dict[str, None] = field(default_factory=dict)
    """Notes of values that were not read as they are written."""
    reading: dict[str, Any] = field(default_factory=dict)
    """How the data were read."""
    adapters: list[AppliedAdapter] = field(default_factory=list)
    """The adapter of the model."""

    def list_unused(self, name: str) -> None:
        """Note one thing that was not used; beyond some, only that there are more."""
        self.unused.setdefault(name if len(self.unused) < _MOST_UNUSED else "and more")

    def note(self, message: str) -> None:
        """Note what changes numbers."""
        self.notices.setdefault(message if len(self.notices) < _MOST_NOTICES else "and more")

    def as_json(self) -> dict[str, Any]:
        """Return the notes for a piece's file."""
        return {**vars(self), "unused": list(self.unused), "notices": list(self.notices),
                "adapters": [plain(each) for each in self.adapters]}  # fmt: skip

    def as_frame(self) -> dict[str, Any]:
        """Return the notes as the last frame has them."""
        lists = {"unused": tuple(self.unused), "notices": tuple(self.notices), "adapters": tuple(self.adapters)}
        return {**lists, "reading": read(Reading, dict(self.reading), "reading")}

    def take(self, found: Mapping[str, Any]) -> None:
        """Take the notes of a piece, whose loaders have read for the whole job; none where it left none."""
        for name in found.get("unused", ()):
            self.list_unused(str(name))
        for message in found.get("notices", ()):
            self.note(str(message))
        self.reading.update(found.get("reading", {}))
        self.adapters.extend(read(AppliedAdapter, each, "adapters") for each in found.get("adapters", ()))


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt, once its document is known."""

    assignment: Assignment
    document: JobDocument
    """As it was given; of an extension, with what was collected with."""
    extended: Extended | None
    workspace: Workspace
    context: LoaderContext
    pipe: FramePipe
    notes: InputNotes
    unmeasured: tuple[str, ...]
    """Assumptions of a plan for a device that is not here."""
    read: ReadDigests = field(default_factory=ReadDigests)
    """Digests of the data that a piece has read."""


def parse_document(document: Mapping[str, Any]) -> JobDocument:
    """Read the document strictly: no string for a number, no number for a flag."""
    try:
        raw = json.dumps(document, allow_nan=False)
    except ValueError as error:
        raise Refusal("the document holds NaN or Infinity; take ordinary numbers", pointer="") from error
    try:
        return _DOCUMENT.validate_json(raw, strict=True)
    except ValidationError as error:
        raise DocumentRefused(complaints(error.errors(include_url=False), DOCUMENT)) from error


def begin_attempt(assignment: Assignment, pipe: FramePipe, stop: StopFlag) -> Attempt:
    """Settle what this process computes with, judge the document, and go on from what an earlier attempt has left."""
    # read when CUDA's libraries are first used; without it their products are not the same in every run
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = computing_device(assignment.leased)
    grow_segments(device)
    settle_numerics(device)
    threads = settle_threads(assignment)
    ranks = group.start(device)
    if ranks.size > 1:
        assignment = assignment_of_rank(assignment, ranks)
    # read when the hub's libraries are imported, which the loaders do first
    os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    if assignment.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    pipe.send(Started(environment=computing_environment(device)))
    if assignment.numerics is not None and threads["threads"] > (cores := len(os.sched_getaffinity(0))):
        pipe.log(
            "warning",
            f"computes with the {threads['threads']} threads of the first attempt on {cores} cores: "
            "the numbers stay the same, and it takes longer",
        )
    requested = parse_document(assignment.document)
    if assignment.estimate and (refused := unplannable(requested)) is not None:
        raise DocumentRefused((refused,))
    assignment = bounds_of_plan(assignment)
    wanted = assignment.device if assignment.estimate else None
    device, memory, unmeasured = computing_budget(requested, device, assignment.bounds, wanted)
    notes = InputNotes()
    context = _context(assignment, pipe, stop, memory, notes)
    extended = None if requested.extends is None else open_extended(requested, assignment, context, parse_document)
    document = requested if extended is None else extended.document
    seed_libraries(document.collection.seed)
    adopt_checkpoint(assignment.scratch, assignment.earlier)
    here = not unmeasured
    machine = Machine(
        budget=memory,
        curve=MemoryCurve(stages=StagePeaks(apart=True), begun=process_begun()),
        guard=Guard(
            budget=memory,
            # one that is not here has nothing to ask what is free
            device=device if here else torch.device("cpu"),
            log=pipe.log,
            # a budget that is named is held by the kernel; CUDA maps what no such limit is meant for
            by_kernel=document.memory.host != "auto" and device.type != "cuda",
        ),
        device=device,
        ranks=ranks,
        threads=threads,
        measure_speed=_measured(device, assignment.scratch, pipe) if here else lambda _: None,
    )
    return Attempt(
        assignment=assignment,
        document=document,
        extended=extended,
        workspace=_workspace(assignment, document, pipe, machine, context),
        context=context,
        pipe=pipe,
        notes=notes,
        unmeasured=unmeasured,
    )


def _context(
    assignment: Assignment, pipe: FramePipe, stop: StopFlag, memory: MemoryBudget, notes: InputNotes
) -> LoaderContext:
    return LoaderContext(
        store=assignment.store,
        offline=assignment.offline,
        paths=assignment.paths,
        factories=assignment.allowed.factories,
        directories=assignment.allowed.directories,
        model_path=assignment.model_path,
        data_path=assignment.data_path,
        query_path=assignment.query_path,
        report=pipe.report,
        checkpoint=stop.checkpoint,
        log=pipe.log,
        note=notes.note,
        unused=notes.list_unused,
        describe=notes.reading.__setitem__,
        adapted=notes.adapters.append,
        shapes_only=assignment.estimate,
        # the budget counts what this process holds already; inputs that are small the plan refuses, with its reasons
        most_bytes=max(_SMALL_INPUT_BYTES, memory.host_bytes - resident_bytes()),
    )


def _workspace(
    assignment: Assignment, document: JobDocument, pipe: FramePipe, machine: Machine, context: LoaderContext
) -> Workspace:
    keeps_files = machine.ranks.rank == 0
    artifacts: Artifacts = ArtifactFiles(assignment.artifacts, pipe.artifact) if keeps_files else NoFiles()
    options = {kind: None if ANALYSES[kind].params is None else getattr(document, kind) for kind in document.kinds}
    return Workspace(
        inputs=ModelInputs(model=None, batches=None, task=document.task),
        options=JobOptions(
            collection=document.collection,
            stabilisation=document.stabilisation,
            woodbury=document.woodbury,
            keep=document.keep,
            kinds=document.kinds,
            decomposition=most_decomposed(given or ANALYSES[kind] for kind, given in options.items()),
            params=options,
            memory=document.memory,
        ),
        machine=machine,
        ports=Ports(
            artifacts=artifacts,
            files=artifacts if isinstance(artifacts, ArtifactFiles) else None,
            keeps_files=keeps_files,
            scratch=ScratchFiles(assignment.scratch, pipe.keep),
            report=pipe.report,
            raise_if_cancelled=context.checkpoint,
            log=pipe.log,
            notice=context.notice,
            announce_plan=pipe.planned,
        ),
        resume=Resume(
            checkpoint_seconds=assignment.checkpoint_seconds,
            conditions={
                "document": hashlib.sha256(canonical_json(assignment.document).encode()).hexdigest(),
                "piece": plain(assignment.piece),
                "version of Kronoscope": importlib.metadata.version("kronoscope"),
            },
            chosen=Chosen.read(assignment.plan) if assignment.plan else None,
            numerics=assignment.numerics,
            completed=frozenset((str(kind), int(ordinal)) for kind, ordinal in assignment.completed),
        ),
    )


def _measured(device: torch.device, scratch: Path, pipe: FramePipe) -> Callable[[bool], DeviceSpeed | None]:
    """Return what measures the device, and the disk that factors wait on where they do."""

    def measure(spills: bool) -> DeviceSpeed | None:
        try:
            return measure_speed(device, scratch if spills else None)
        except OSError as error:
            pipe.log("warning", f"seconds are the usual ones, as the disk cannot be measured: {error.strerror}")
            return None

    return measure


def adopt_checkpoint(own: Path, earlier: Iterable[Path]) -> None:
    """Bring the newest checkpoint of earlier attempts, and what it needs, into this attempt's folder.

    The earlier folders are deleted. Without a checkpoint, or where a file cannot be had, ``own``
    holds none: the attempt begins anew. A marker of decompositions that an attempt ended in is brought like one.
    A file is never written in place, so a link to it keeps its bytes whatever a zombie of an earlier attempt does next.
    """
    for torn in own.rglob(f"{_PART}*") if own.is_dir() else ():
        torn.unlink(missing_ok=True)
    earlier = tuple(earlier)
    if not _holds_one(own):
        newest = next((each for each in earlier if _holds_one(each)), None)
        if newest is not None:
            try:
                _link_all(newest, own)
            except OSError:
                shutil.rmtree(own, ignore_errors=True)
    for each in earlier:
        shutil.rmtree(each, ignore_errors=True)


def _holds_one(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MANIFESTS) or any(folder.glob(_MARKERS))


def _link_all(source: Path, target: Path) -> None:
    """Link every complete file, the manifests last: they are what makes the others a checkpoint."""
    names = [
        each.relative_to(source) for each in source.rglob("*") if each.is_file() and not each.name.startswith(_PART)
    ]
    for name in sorted(names, key=lambda name: name.as_posix() in MANIFESTS):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, place)
        except FileExistsError:
            continue
        except OSError:
            # a file system without links
            shutil.copyfile(source / name, place)
