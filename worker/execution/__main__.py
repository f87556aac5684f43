"""The child: computes one job and tells its parent about it in frames; writes nothing but artifacts.

    python -P -m worker.execution --answers FD --frames FD        (the assignment comes on standard input)

The last frame is ``finished`` (exit code 0), ``failed`` (2 usage, 3 transient, 4 fatal),
``stopped`` (5) or ``divided`` (6: it goes on when its pieces have ended). SIGTERM stops it at its next
checkpoint: a batch, a layer, a training step.
"""

import gc

gc.disable()  # modules that are loaded are no garbage: to look for some takes a seventh of the start

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from catalog import ANALYSES, DOCUMENT
from catalog.analyses.analysis import RefusedAnalysis
from catalog.field_errors import complaints
from catalog.frames import Divided, Finished, Reading, Started, Stopped, Summarised, layer_frame
from catalog.record import plain
from catalog.record_reader import read
from catalog.requests.assignment import Assignment, read_assignment
from catalog.requests.cached_factors import FILLED
from catalog.requests.estimate import unplannable
from catalog.requests.job import JobDocument
from engine.analyses.run_analyses import run_analyses
from engine.collection.parameter_windows import list_parameters
from engine.distributed import group
from engine.errors import StopRequested
from engine.layers.coverage_check import survey_layers
from engine.model.state.usable_model import require_usable
from engine.operators.loss_gradient import require_fit
from engine.workspace import Workspace
from worker.execution.cache.factor_cache import CacheUse, FactorCache, ask_parent
from worker.execution.cache.factor_cache_key import factor_key, reason_uncacheable
from worker.execution.caller_code import CallerCode
from worker.execution.computing_environment import (
    computing_device,
    computing_environment,
    seed_libraries,
    settle_numerics,
    settle_threads,
)
from worker.execution.computing_place import ComputingPlace, computing_place
from worker.execution.data.images.opened_images import OpenedImages, load_images
from worker.execution.failures import DocumentRefused, failure_of
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.frame_pipe import FramePipe
from worker.execution.input_digests import InputDigests, factors_digest
from worker.execution.job_inputs import (
    enter_data,
    load_model,
    open_against,
    open_factors,
    open_gradient,
    try_before_training,
)
from worker.execution.loader_context import LoaderContext
from worker.execution.pieces.division import (
    begins,
    compute_piece,
    divide,
    enter_piece,
    join,
    joined_digests,
    joins,
    take_pieces,
)
from worker.execution.pieces.extension import (
    EXTENSION,
    Extended,
    collect_extension,
    enter_extension,
    extended_digests,
    open_extended,
)
from worker.execution.pieces.read_digests import FILE as READ
from worker.execution.pieces.read_digests import ReadDigests, read_notes
from worker.execution.ranks.rank_link import connect, read_assignment_text
from worker.execution.ranks.rank_part import (
    assignment_of_rank,
    place_model,
    require_same_data,
    take_part,
)
from worker.execution.refusal import Refusal
from worker.execution.resolve import resolve
from worker.execution.resume_scratch import adopt_checkpoint
from worker.execution.start.job_workspace import InputNotes, make_context, make_workspace
from worker.execution.start.planned_part import bounds_of_plan, plan_part
from worker.execution.stop_flag import StopFlag

gc.freeze()
gc.enable()

EXIT_STOPPED = 5
EXIT_DIVIDED = 6
_EXIT_CODES = {"usage": 2, "transient": 3, "fatal": 4}
ESTIMATE = "engine.estimate:estimate"


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


def execute(assignment: Assignment, pipe: FramePipe, checkpoint: StopFlag) -> Finished | Divided:
    """Run every analysis of the document and send its rows as frames, or what of a divided job is this attempt's."""
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
    context = make_context(assignment, pipe, checkpoint, place, notes)
    extended = None if requested.extends is None else open_extended(requested, assignment, context, parse_document)
    document = requested if extended is None else extended.document
    seed_libraries(document.collection.seed)
    adopt_checkpoint(assignment.scratch, assignment.earlier)
    attempt = _Attempt(
        assignment=assignment,
        document=document,
        extended=extended,
        workspace=make_workspace(assignment, document, pipe, checkpoint, place, context.notice),
        context=context,
        pipe=pipe,
        place=place,
        notes=notes,
    )
    finished = _compute(attempt)
    if isinstance(finished, Finished):
        finished = replace(
            finished,
            unused=tuple(notes.unused),
            notices=tuple(notes.notices),
            reading=read(Reading, dict(notes.reading), "reading"),
            adapters=tuple(notes.adapters),
        )
    # an attempt that ends otherwise leaves it to the next; one that knows that there is none clears it
    shutil.rmtree(assignment.scratch, ignore_errors=True)
    group.stop()
    return finished


@dataclass(frozen=True, kw_only=True)
class _Attempt:
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


def _compute(attempt: _Attempt) -> Finished | Divided:
    assignment, workspace, pipe = attempt.assignment, attempt.workspace, attempt.pipe
    checkpoint = workspace.ports.raise_if_cancelled
    opened = _open_inputs(attempt)
    if isinstance(opened, (Finished, Divided)):
        return opened
    with contextlib.ExitStack() as ending:
        if workspace.ports.cache is not None:
            ending.callback(workspace.ports.cache.close)
        if assignment.piece is not None:
            compute_piece(assignment, assignment.piece, workspace)
        refused = () if assignment.piece is not None else _analyse(workspace, pipe)
    for line in workspace.machine.curve.stages.exceeded():
        pipe.log("warning", line)
    curve = workspace.machine.curve.as_json(attempt.place.device)
    workspace.ports.artifacts.save_json("memory_curve.json", curve)
    finished = Finished(
        refused=refused,
        factors_sha256=factors_digest(workspace.inputs.stored),
        against_sha256=factors_digest(workspace.inputs.stored_against),
    )
    if opened is None:
        if not joins(assignment):
            return finished
        attempt.notes.take(read_notes(assignment.pieces))
        return joined_digests(finished, assignment.pieces)
    data_sha256 = opened.data_sha256(checkpoint)
    require_same_data(attempt.place.ranks, data_sha256)
    if assignment.piece is not None:
        workspace.ports.artifacts.save_json(READ, attempt.read.as_json(attempt.notes.as_json()))
    examples = opened.examples if attempt.read.data is None else attempt.read.queries
    finished = replace(finished, model_sha256=opened.model_sha256, data_sha256=data_sha256, examples=examples)
    return finished if attempt.extended is None else extended_digests(finished, attempt.extended)


def _open_inputs(attempt: _Attempt) -> InputDigests | OpenedImages | Finished | Divided | None:
    """Give the workspace its inputs; return digests of model and data, None without, or the attempt's last frame."""
    assignment, document, workspace, context = attempt.assignment, attempt.document, attempt.workspace, attempt.context
    if assignment.piece is None:
        workspace.inputs.gradient = open_gradient(document, context)
        # before a model is loaded and data are read: what cannot be compared ends here
        if not assignment.estimate:
            workspace.inputs.stored_against = open_against(document, assignment, context)
    apart = next((ANALYSES[kind] for kind in document.kinds if not ANALYSES[kind].collects), None)
    if apart is not None:
        return _open_images(attempt, apart.estimate)
    if document.factors is not None:
        workspace.inputs.stored = open_factors(document, assignment, context)
        workspace.machine.guard.hold()
        return None
    if joins(assignment):
        return join(document, assignment, workspace)
    if assignment.piece is not None and assignment.piece.round == "decompose":
        take_pieces(assignment, workspace)
        return None
    return _open_model(attempt)


def _open_images(attempt: _Attempt, estimate: str) -> OpenedImages | Finished:
    """Open the images that episodes are drawn of, and the weights that a training begins with."""
    document, workspace, context = attempt.document, attempt.workspace, attempt.context
    with workspace.machine.operation("data"):
        opened = load_images(document, context)
    workspace.inputs.images, workspace.inputs.examples = opened.data, opened.examples
    if attempt.assignment.estimate:
        _announce(attempt, resolve(estimate)(workspace))
        return Finished()
    return opened


def _announce(attempt: _Attempt, plan: Mapping[str, Any]) -> None:
    device, unmeasured = attempt.place.device.type, list(attempt.place.unmeasured)
    attempt.pipe.planned({**plan, "device": device, "unmeasured": unmeasured})


def _open_model(attempt: _Attempt) -> InputDigests | Finished | Divided:
    """Load the model and open the data, or those of this attempt's piece."""
    assignment, document, workspace, context = attempt.assignment, attempt.document, attempt.workspace, attempt.context
    place = attempt.place
    with workspace.machine.operation("model"):
        try_before_training(document, context)
        loaded = load_model(document, context)
    # what the modules alone show of the coverage, before data is read and a device is touched
    if not assignment.estimate:
        require_usable(loaded.model)
        survey_layers(loaded.model, document.collection)
        if workspace.inputs.gradient is not None:
            require_fit(workspace.inputs.gradient, list_parameters(loaded.model))
    with workspace.machine.operation("data"):
        data = enter_data(document, loaded, context, workspace.inputs)
    if assignment.estimate:
        workspace.inputs.model = loaded.model
        part = plan_part(document, data, workspace.inputs)
        plan = resolve(ESTIMATE)(workspace, part.pieces)
        _announce(attempt, {**plan, **part.said})
        return Finished()
    if attempt.extended is not None:
        data = enter_extension(attempt.extended, data, workspace)
    data = enter_piece(assignment, document, data, workspace, attempt.read)
    seed = document.collection.seed
    digests = None if begins(document, assignment) else InputDigests(loaded.model, data.batches, seed)
    with workspace.machine.operation("model to device"):
        sharded = document.memory.model_sharding == "on"
        workspace.inputs.model = place_model(loaded.model, place.device, place.ranks, sharded=sharded)
    attempt.pipe.log("info", f"model: {loaded.provenance}")
    if digests is None:
        return divide(document, assignment.devices, data, workspace)
    workspace.inputs.batches = digests.stream
    take_part(workspace.inputs, place.ranks, document.collection.batch_size, digests.model_sha256)
    if attempt.extended is not None:
        scratch = ArtifactFiles(assignment.scratch / EXTENSION, None)
        collect_extension(attempt.extended, digests.model_sha256, scratch, workspace)
    elif assignment.piece is None:
        _use_cache(attempt, digests)
    return digests


def _use_cache(attempt: _Attempt, digests: InputDigests) -> None:
    """Give the workspace a cache, if there is one and the collection can be identified."""
    assignment, document, workspace = attempt.assignment, attempt.document, attempt.workspace
    if assignment.cache is None or workspace.inputs.model is None:
        return
    why = reason_uncacheable(document, workspace.inputs.model)
    if why is not None:
        workspace.ports.log("debug", f"factors are not cached: {why}")
        return
    workspace.ports.report("data", 0, None, "sources")
    data = digests.data_sha256(workspace.ports.raise_if_cancelled)
    ranks = workspace.machine.ranks
    workspace.ports.cache = FactorCache(
        CacheUse(
            key=factor_key(document, workspace.inputs.model, data, workspace.machine.device, ranks.size),
            view=assignment.cache,
            filled=assignment.artifacts / FILLED,
            refresh=document.cache == "refresh",
            ask=ask_parent(attempt.pipe, ranks, workspace.ports.raise_if_cancelled),
            tell=attempt.pipe.send,
            fills=workspace.ports.keeps_files,
            agree=lambda found: all(ranks.gather(found, "cached factors")),
        ),
        limit_bytes=assignment.cache_bytes,
        unchanged=lambda: bool(digests.stream.digests) and set(digests.stream.digests) == {data},
        log=workspace.ports.log,
    )


def _analyse(workspace: Workspace, pipe: FramePipe) -> tuple[RefusedAnalysis, ...]:
    """Send the rows and summaries of all analyses up; return those that were refused."""
    return run_analyses(
        workspace,
        lambda row: pipe.send(layer_frame(row)),
        lambda kind, summary: pipe.send(Summarised(kind=kind, summary=plain(summary))),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the job whose assignment stands on standard input."""
    parser = argparse.ArgumentParser(prog="worker.execution", description="Compute one job; started by its parent.")
    parser.add_argument("--frames", type=int, required=True, help="descriptor that frames are written to")
    parser.add_argument("--answers", type=int, help="descriptor that answers come from")
    descriptors = parser.parse_args(arguments)
    stop = StopFlag()
    stop.install()
    ranked = connect(descriptors.answers)
    pipe = ranked or FramePipe(descriptors.frames, descriptors.answers)
    callers = CallerCode()
    try:
        text = sys.stdin.buffer.read() if ranked is None else read_assignment_text()
        assignment = read_assignment(text)
        callers = CallerCode.of(assignment)
        finished = execute(assignment, pipe, stop)
    except StopRequested:
        pipe.send(Stopped())
        return EXIT_STOPPED
    except BrokenPipeError:
        # the reader is gone: the parent has ended, and the guardian is about to end this process
        return _EXIT_CODES["fatal"]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the parent gets it
        failed = failure_of(error, callers)
        pipe.send(failed)
        return _EXIT_CODES[failed.category]
    pipe.send(finished)
    return EXIT_DIVIDED if isinstance(finished, Divided) else 0


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Compute the job and end this process."""
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # frames are out and files are synced; a caller's threads and exit hooks have no say in how this ends
    os._exit(code)


if __name__ == "__main__":
    run()
