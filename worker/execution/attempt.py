"""The attempt of a child: its assignment, its document, and the workspace that both are made into, without inputs."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from catalog import ANALYSES, DOCUMENT
from catalog.analyses.analysis import most_decomposed
from catalog.field_errors import complaints
from catalog.frames import AppliedAdapter, Reading, Started
from catalog.record import canonical_json, plain
from catalog.record_reader import read
from catalog.requests.assignment import Assignment
from catalog.requests.estimate import unplannable
from catalog.requests.job import JobDocument
from engine.artifacts import Artifacts
from engine.distributed import group
from engine.memory.budget import resident_bytes
from engine.memory.device_speed import DeviceSpeed, measure_speed
from engine.memory.guard import Guard
from engine.memory.memory_curve import MemoryCurve, StagePeaks
from engine.memory.plan import Chosen
from engine.workspace import JobOptions, Machine, ModelInputs, Ports, Resume, Workspace
from worker.execution.computing_environment import (
    computing_device,
    computing_environment,
    process_begun,
    seed_libraries,
    settle_numerics,
    settle_threads,
)
from worker.execution.computing_place import ComputingPlace, computing_place
from worker.execution.failures import DocumentRefused
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.frame_pipe import FramePipe
from worker.execution.loader_context import LoaderContext
from worker.execution.pieces.extension import Extended, open_extended
from worker.execution.pieces.read_digests import ReadDigests
from worker.execution.ranks.rank_part import NoFiles, assignment_of_rank, bounds_of_plan
from worker.execution.refusal import Refusal
from worker.execution.resume_scratch import adopt_checkpoint
from worker.execution.stop_flag import StopFlag

_SMALL_INPUT_BYTES = 256 * 2**20
_MOST_UNUSED = 500
_MOST_NOTICES = 50


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
    place: ComputingPlace
    notes: InputNotes
    read: ReadDigests = field(default_factory=ReadDigests)
    """Digests of the data that a piece has read."""


def parse_document(document: Mapping[str, Any]) -> JobDocument:
    """Read the document strictly: no string for a number, no number for a flag."""
    try:
        raw = json.dumps(document, allow_nan=False)
    except ValueError as error:
        raise Refusal("the document holds NaN or Infinity; take ordinary numbers", pointer="") from error
    try:
        parsed: JobDocument = TypeAdapter(DOCUMENT).validate_json(raw, strict=True)
    except ValidationError as error:
        raise DocumentRefused(complaints(error.errors(include_url=False), DOCUMENT)) from error
    return parsed


def begin_attempt(assignment: Assignment, pipe: FramePipe, stop: StopFlag) -> Attempt:
    """Settle what this process computes with, judge the document, and go on from what an earlier attempt has left."""
    # read when CUDA's libraries are first used; without it their products are not the same in every run
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = computing_device(assignment.leased)
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
    place = computing_place(requested, device, assignment.bounds, assignment.device if assignment.estimate else None)
    place = replace(place, ranks=ranks, threads=threads)
    notes = InputNotes()
    context = _context(assignment, pipe, stop, place, notes)
    extended = None if requested.extends is None else open_extended(requested, assignment, context, parse_document)
    document = requested if extended is None else extended.document
    seed_libraries(document.collection.seed)
    adopt_checkpoint(assignment.scratch, assignment.earlier)
    workspace = _workspace(assignment, document, pipe, place, context)
    return Attempt(
        assignment=assignment,
        document=document,
        extended=extended,
        workspace=workspace,
        context=context,
        pipe=pipe,
        place=place,
        notes=notes,
    )


def _context(
    assignment: Assignment, pipe: FramePipe, stop: StopFlag, place: ComputingPlace, notes: InputNotes
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
        most_bytes=max(_SMALL_INPUT_BYTES, place.memory.host_bytes - resident_bytes()),
    )


def _workspace(
    assignment: Assignment, document: JobDocument, pipe: FramePipe, place: ComputingPlace, context: LoaderContext
) -> Workspace:
    device, memory = place.device, place.memory
    keeps_files = place.ranks.rank == 0
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
        machine=Machine(
            budget=memory,
            curve=MemoryCurve(stages=StagePeaks(apart=True), begun=process_begun()),
            # a budget that is named is held by the kernel; CUDA maps what no such limit is meant for
            guard=Guard(
                budget=memory,
                device=place.guarded,
                log=pipe.log,
                by_kernel=document.memory.host != "auto" and device.type != "cuda",
            ),
            device=device,
            ranks=place.ranks,
            threads=place.threads,
            measure_speed=_measured(device, assignment.scratch, pipe) if place.here else lambda _: None,
        ),
        ports=Ports(
            artifacts=artifacts,
            files=artifacts if isinstance(artifacts, ArtifactFiles) else None,
            keeps_files=keeps_files,
            # neither announced nor hashed: it is read by this job alone, and a checkpoint brings its own digests
            scratch=ArtifactFiles(assignment.scratch, None),
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
