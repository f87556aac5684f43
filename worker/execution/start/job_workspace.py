"""The workspace of an attempt, made of its document and its assignment, before anything is loaded."""

import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from catalog import ANALYSES
from catalog.analyses.analysis import most_decomposed
from catalog.frames import AppliedAdapter
from catalog.record import canonical_json, plain
from catalog.record_reader import read
from catalog.requests.assignment import Assignment
from catalog.requests.job import JobDocument
from engine.artifacts import Artifacts
from engine.memory.budget import resident_bytes
from engine.memory.device_speed import DeviceSpeed, measure_speed
from engine.memory.guard import Guard
from engine.memory.memory_curve import MemoryCurve, StagePeaks
from engine.memory.plan import Chosen
from engine.workspace import JobOptions, Machine, ModelInputs, Ports, Resume, Workspace
from worker.execution.computing_environment import process_begun
from worker.execution.computing_place import ComputingPlace
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.frame_pipe import FramePipe
from worker.execution.loader_context import LoaderContext
from worker.execution.ranks.rank_part import NoFiles
from worker.execution.stop_flag import StopFlag

_SMALL_INPUT_BYTES = 256 * 2**20
_MOST_UNUSED = 500
_MOST_NOTICES = 50


def make_workspace(
    assignment: Assignment,
    document: JobDocument,
    pipe: FramePipe,
    checkpoint: StopFlag,
    place: ComputingPlace,
    notice: Callable[[str], None],
) -> Workspace:
    """Return the workspace of an attempt without its inputs."""
    device, memory = place.device, place.memory
    keeps_files = place.ranks.rank == 0
    artifacts: Artifacts = ArtifactFiles(assignment.artifacts, pipe.artifact) if keeps_files else NoFiles()
    return Workspace(
        inputs=ModelInputs(model=None, batches=None, task=document.task),
        options=JobOptions(
            collection=document.collection,
            stabilisation=document.stabilisation,
            woodbury=document.woodbury,
            keep=document.keep,
            kinds=document.kinds,
            decomposition=most_decomposed(options_of(kind, document) or ANALYSES[kind] for kind in document.kinds),
            params={kind: options_of(kind, document) for kind in document.kinds},
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
            raise_if_cancelled=checkpoint.checkpoint,
            log=pipe.log,
            notice=notice,
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

    def take(self, found: Mapping[str, Any]) -> None:
        """Take the notes of a piece, whose loaders have read for the whole job; none where it left none."""
        for name in found.get("unused", ()):
            self.list_unused(str(name))
        for message in found.get("notices", ()):
            self.note(str(message))
        self.reading.update(found.get("reading", {}))
        self.adapters.extend(read(AppliedAdapter, each, "adapters") for each in found.get("adapters", ()))


def make_context(
    assignment: Assignment, pipe: FramePipe, checkpoint: StopFlag, place: ComputingPlace, notes: InputNotes
) -> LoaderContext:
    """Return what the loaders of an attempt may use."""
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
        checkpoint=checkpoint.checkpoint,
        log=pipe.log,
        note=notes.note,
        unused=notes.list_unused,
        describe=notes.reading.__setitem__,
        adapted=notes.adapters.append,
        shapes_only=assignment.estimate,
        # the budget counts what this process holds already; inputs that are small the plan refuses, with its reasons
        most_bytes=max(_SMALL_INPUT_BYTES, place.memory.host_bytes - resident_bytes()),
    )


def options_of(kind: str, document: JobDocument) -> Any:  # noqa: ANN401 - each analysis has its own
    """Return the options of one analysis."""
    return None if ANALYSES[kind].params is None else getattr(document, kind)
