"""The child: computes one job and tells its parent about it in frames; writes nothing but artifacts.

    python -P -m worker.execution --frames FD        (the assignment comes on standard input)

The last frame is ``finished`` (exit code 0), ``failed`` (2 usage, 3 transient, 4 fatal) or
``stopped`` (5). SIGTERM stops it at its next checkpoint: a batch, a layer, a training step.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import random
import shutil
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from catalog import ANALYSES, DOCUMENT
from catalog.analysis import LayerResult, most_decomposed
from catalog.estimate import unplannable
from catalog.field_errors import complaints
from catalog.frames import Finished, Started, Stopped, Summarised, layer_frame
from catalog.job import JobDocument
from catalog.record import canonical_json, plain
from engine.errors import StopRequested
from engine.layers.coverage_check import survey_layers
from engine.memory.budget import resident_bytes
from engine.memory.guard import Guard
from engine.memory.memory_curve import MemoryCurve
from engine.memory.stage_peaks import StagePeaks
from engine.workspace import JobOptions, Machine, ModelInputs, Ports, Resume, Workspace
from worker.execution.assignment import Assignment, read_assignment
from worker.execution.cache.factor_cache import CacheUse, FactorCache
from worker.execution.cache.factor_cache_key import factor_key, reason_uncacheable
from worker.execution.computing_environment import computing_device, computing_environment
from worker.execution.computing_place import ComputingPlace, computing_place
from worker.execution.device_calibration import Calibration
from worker.execution.failures import DocumentRefused, failure_of
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.frame_pipe import FramePipe
from worker.execution.input_digests import InputDigests, factors_digest
from worker.execution.job_inputs import (
    load_data,
    load_model,
    open_against,
    open_factors,
    open_gradient,
    try_before_training,
)
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal
from worker.execution.resolve import resolve
from worker.execution.resume_scratch import adopt_checkpoint
from worker.execution.stop_flag import StopFlag

EXIT_STOPPED = 5
_SMALL_INPUT_BYTES = 256 * 2**20


_EXIT_CODES = {"usage": 2, "transient": 3, "fatal": 4}


ESTIMATE = "engine.estimate:estimate"


def parse_document(document: Mapping[str, Any]) -> JobDocument:
    """Read the document strictly: no string for a number, no number for a flag.

    Args:
        document: The document, as decoded from JSON.

    Returns:
        The document as a record.

    Raises:
        Refusal: If it holds NaN or an infinity.
        DocumentRefused: If it is not valid; with every complaint.
    """
    try:
        raw = json.dumps(document, allow_nan=False)
    except ValueError as error:
        raise Refusal("the document holds NaN or Infinity; take ordinary numbers", pointer="") from error
    try:
        parsed: JobDocument = TypeAdapter(DOCUMENT).validate_json(raw, strict=True)
    except ValidationError as error:
        raise DocumentRefused(complaints(error.errors(include_url=False), DOCUMENT)) from error
    return parsed


def execute(assignment: Assignment, pipe: FramePipe, checkpoint: StopFlag) -> Finished:
    """Run every analysis of the document, and send its rows as frames.

    Args:
        assignment: The job, and what this attempt may use.
        pipe: The pipe to the parent.
        checkpoint: The flag that is read between units of work.

    Returns:
        The last frame, with the digests of model and data.

    Raises:
        StopRequested: If the flag is set meanwhile.
        Exception: Any fault of the job; `failure_of` turns it into the last frame.
    """
    # read when CUDA's libraries are first used; without it their products are not the same in every run
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = computing_device(assignment.leased)
    _settle(assignment.threads, device)
    # read when the hub's libraries are imported, which the loaders do first
    os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    if assignment.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    pipe.send(Started(environment=computing_environment(device)))
    cores = len(os.sched_getaffinity(0))
    if assignment.numerics is not None and (assignment.threads or 0) > cores:
        pipe.log(
            "warning",
            f"computes with the {assignment.threads} threads of the first attempt on {cores} cores: "
            "the numbers stay the same, and it takes longer",
        )
    document = parse_document(assignment.document)
    if assignment.estimate and (refused := unplannable(document)) is not None:
        raise DocumentRefused((refused,))
    _seed(document.collection.seed)
    place = computing_place(document, device, assignment.bounds, assignment.device if assignment.estimate else None)
    adopt_checkpoint(assignment.scratch, assignment.earlier)
    # neither announced nor hashed: it is read by this job alone, and a checkpoint brings its own digests
    scratch = ArtifactFiles(assignment.scratch, None)
    finished = _compute(assignment, document, pipe, checkpoint, place, scratch)
    # an attempt that ends otherwise leaves it to the next; whoever knows that there is none clears it
    shutil.rmtree(assignment.scratch, ignore_errors=True)
    return finished


def _compute(
    assignment: Assignment,
    document: JobDocument,
    pipe: FramePipe,
    checkpoint: StopFlag,
    place: ComputingPlace,
    scratch: ArtifactFiles,
) -> Finished:
    device, memory = place.device, place.memory
    artifacts = ArtifactFiles(assignment.artifacts, pipe.artifact)
    calibration = Calibration(store=assignment.store, device=device, scratch=assignment.scratch, log=pipe.log)
    workspace = Workspace(
        inputs=ModelInputs(model=None, batches=None, task=document.task),
        options=JobOptions(
            collection=document.collection,
            stabilisation=document.stabilisation,
            woodbury=document.woodbury,
            keep=document.keep,
            kinds=document.kinds,
            decomposition=most_decomposed(_options(kind, document) or ANALYSES[kind] for kind in document.kinds),
            params={kind: _options(kind, document) for kind in document.kinds},
            memory=document.memory,
        ),
        machine=Machine(
            budget=memory,
            curve=MemoryCurve(stages=StagePeaks(apart=True)),
            # a budget that somebody names is held by the kernel; CUDA maps what no such limit is meant for
            guard=Guard(
                budget=memory,
                device=place.guarded,
                log=pipe.log,
                by_kernel=document.memory.host != "auto" and device.type != "cuda",
            ),
            device=device,
            speed=calibration.read() if place.here else None,
            measure_speed=calibration.measure if place.here else lambda: None,
        ),
        ports=Ports(
            artifacts=artifacts,
            scratch=scratch,
            report=pipe.report,
            raise_if_cancelled=checkpoint.checkpoint,
            log=pipe.log,
            announce_plan=pipe.planned,
        ),
        resume=Resume(
            checkpoint_seconds=assignment.checkpoint_seconds,
            conditions={
                "document": hashlib.sha256(canonical_json(assignment.document).encode()).hexdigest(),
                "version of Kronoscope": importlib.metadata.version("kronoscope"),
            },
            chosen=assignment.chosen,
            numerics=assignment.numerics,
            completed=assignment.completed,
        ),
    )
    context = LoaderContext(
        store=assignment.store,
        offline=assignment.offline,
        paths=assignment.paths,
        factories=assignment.factories,
        directories=assignment.directories,
        report=pipe.report,
        checkpoint=checkpoint.checkpoint,
        log=pipe.log,
        shapes_only=assignment.estimate,
        # the budget counts what this process holds already; inputs that are small the plan refuses, with its reasons
        most_bytes=max(_SMALL_INPUT_BYTES, memory.host_bytes - resident_bytes()),
    )
    digests: InputDigests | None = None
    workspace.inputs.gradient = open_gradient(document, context)
    # before a model is loaded and data are read: what cannot be compared ends here
    if not assignment.estimate:
        workspace.inputs.stored_against = open_against(document, assignment, context)
    if document.factors is not None:
        workspace.inputs.stored = open_factors(document, assignment, context)
        workspace.machine.guard.hold()
    else:
        with workspace.machine.operation("model"):
            try_before_training(document, context)
            loaded = load_model(document, context)
        # what the modules alone show of the coverage, before data is read and a device is touched
        if not assignment.estimate:
            survey_layers(loaded.model, document.collection)
        with workspace.machine.operation("data"):
            data = load_data(document, loaded, context)
        workspace.inputs.batches, workspace.inputs.examples = data.batches, data.examples
        workspace.inputs.labels = data.labels
        if assignment.estimate:
            workspace.inputs.model = loaded.model
            plan = resolve(ESTIMATE)(workspace)
            pipe.planned({**plan, "device": device.type, "unmeasured": list(place.unmeasured)})
            return Finished()
        digests = InputDigests(loaded.model, data.batches, document.collection.seed)
        workspace.inputs.batches = digests.stream
        with workspace.machine.operation("model to device"):
            workspace.inputs.model = loaded.model.to(device)
        _use_cache(assignment, document, workspace, digests)
        pipe.log("info", f"model: {loaded.provenance}")
    with contextlib.ExitStack() as ending:
        if workspace.ports.cache is not None:
            ending.callback(workspace.ports.cache.close)
        for kind in document.kinds:
            checkpoint.checkpoint()
            with workspace.machine.operation(kind):
                _analyse(kind, document, workspace, pipe)
    for line in workspace.machine.curve.stages.exceeded():
        pipe.log("warning", line)
    artifacts.save_json("memory_curve.json", workspace.machine.curve.as_json(device))
    finished = Finished(
        factors_sha256=factors_digest(workspace.inputs.stored),
        against_sha256=factors_digest(workspace.inputs.stored_against),
    )
    if digests is None:
        return finished
    data_sha256 = digests.data_sha256(checkpoint.checkpoint)
    return replace(finished, model_sha256=digests.model_sha256, data_sha256=data_sha256, examples=digests.examples)


def _use_cache(assignment: Assignment, document: JobDocument, workspace: Workspace, digests: InputDigests) -> None:
    """Give the workspace a cache, if there is one and the collection can be told from every other."""
    if assignment.cache is None or document.cache == "off" or workspace.inputs.model is None:
        return
    why = reason_uncacheable(document, workspace.inputs.model)
    if why is not None:
        workspace.ports.log("debug", f"factors are not cached: {why}")
        return
    workspace.ports.report("data", 0, None, "sources")
    data = digests.data_sha256(workspace.ports.raise_if_cancelled)
    workspace.ports.cache = FactorCache(
        assignment.cache,
        CacheUse(
            key=factor_key(document, workspace.inputs.model, data, workspace.machine.device),
            job=assignment.job,
            own=assignment.scratch / "cached",
            refresh=document.cache == "refresh",
        ),
        limit_bytes=assignment.cache_bytes,
        unchanged=lambda: bool(digests.stream.digests) and set(digests.stream.digests) == {data},
        log=workspace.ports.log,
    )


def _settle(threads: int | None, device: torch.device) -> None:
    """What must stand before the first tensor: the same numbers on the same machine."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        # not an error where an operation has no deterministic form: the record will tell
        torch.use_deterministic_algorithms(True, warn_only=True)


def _seed(seed: int) -> None:
    """For models and data that draw; our own labels are keyed by counters and need none."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - a caller's factory may use the global generator


def _analyse(kind: str, document: JobDocument, workspace: Workspace, pipe: FramePipe) -> None:
    """Pull one analysis's rows and send each up; its return value is the summary."""
    rows: Generator[LayerResult, None, Any] = resolve(ANALYSES[kind].function)(_options(kind, document), workspace)
    while True:
        try:
            row = next(rows)
        except StopIteration as end:
            pipe.send(Summarised(kind=kind, summary=plain(end.value)))
            return
        pipe.send(layer_frame(row))


def _options(kind: str, document: JobDocument) -> Any:  # noqa: ANN401 - each analysis has its own
    return None if ANALYSES[kind].params is None else getattr(document, kind)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the job whose assignment stands on standard input.

    Args:
        arguments: The command line without the program's name; None for that of the process.

    Returns:
        The exit code: 0 finished, 2 usage, 3 transient, 4 fatal, 5 stopped.
    """
    parser = argparse.ArgumentParser(prog="worker.execution", description="Compute one job; started by its parent.")
    parser.add_argument("--frames", type=int, required=True, help="descriptor that frames are written to")
    pipe = FramePipe(parser.parse_args(arguments).frames)
    stop = StopFlag()
    stop.install()
    try:
        finished = execute(read_assignment(sys.stdin.buffer.read()), pipe, stop)
    except StopRequested:
        pipe.send(Stopped())
        return EXIT_STOPPED
    except BrokenPipeError:
        # nobody reads: the parent is gone, and the guardian is about to end this process
        return _EXIT_CODES["fatal"]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the parent is told
        failed = failure_of(error)
        pipe.send(failed)
        return _EXIT_CODES[failed.category]
    pipe.send(finished)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # frames are out and files are synced; a caller's threads and exit hooks have no say in how this ends
    os._exit(code)
