"""Sources of an attempt's inputs: a table, of which the first that serves the attempt opens them.

images         episodes are drawn of them, and nothing is collected
factors        those of an earlier job, or a single matrix, in place of model and data
pieces         what the pieces of a divided job have collected; a piece decomposes layers of it
model          a model with its data, those of a piece, or those that are added to an earlier job's
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from catalog import ANALYSES
from catalog.frames import Divided, Finished
from catalog.requests.cached_factors import FILLED
from catalog.requests.job import JobDocument
from engine.collection.parameter_windows import list_parameters
from engine.layers.coverage import survey_layers
from engine.model.state.preserve_state import require_usable
from engine.operators.loss_gradient import require_fit
from engine.workspace import DataPart, ModelInputs
from worker.execution.attempt import Attempt
from worker.execution.data.stream import DataStream
from worker.execution.factor_cache import CacheUse, FactorCache, ask_parent, factor_key, reason_uncacheable
from worker.execution.input_digests import InputDigests
from worker.execution.job_inputs import (
    OpenedImages,
    enter_data,
    load_images,
    load_model,
    open_against,
    open_factors,
    open_gradient,
    try_before_training,
)
from worker.execution.pieces.data_extent import cut_pieces, measure_extent
from worker.execution.pieces.division import divide, enter_piece, join, joined_digests, take_pieces
from worker.execution.pieces.extension import collect_extension, enter_extension, extended_digests
from worker.execution.pieces.read_digests import FILE as READ
from worker.execution.pieces.read_digests import read_notes
from worker.execution.ranks.rank_part import PlannedRanks, own_examples, place_model, require_same_data, take_part
from worker.execution.resolve import resolve

ESTIMATE = "engine.estimate:estimate"

Inputs = Callable[[Finished], Finished]
"""Inputs that stand in the workspace, as the last frame says what they were."""


class Source(NamedTuple):
    """A kind of inputs."""

    serves: Callable[[Attempt], bool]
    open: Callable[[Attempt], Inputs | Finished | Divided]
    """Gives the workspace its inputs; a last frame where nothing is computed over them."""


def open_inputs(attempt: Attempt) -> Inputs | Finished | Divided:
    """Give the workspace of an attempt its inputs."""
    document, context, inputs = attempt.document, attempt.context, attempt.workspace.inputs
    if attempt.assignment.piece is None:
        inputs.gradient = open_gradient(document, context)
        # before a model is loaded and data are read: what cannot be compared ends here
        if not attempt.assignment.estimate:
            inputs.stored_against = open_against(document, attempt.assignment, context)
    return next(each.open(attempt) for each in SOURCES if each.serves(attempt))


def _images(attempt: Attempt) -> Inputs | Finished:
    """Open the images that episodes are drawn of, and the weights that a training begins with."""
    workspace = attempt.workspace
    with workspace.machine.operation("data"):
        opened = load_images(attempt.document, attempt.context)
    workspace.inputs.images, workspace.inputs.examples = opened.data, opened.examples
    if attempt.assignment.estimate:
        apart = next(each for each in map(ANALYSES.__getitem__, attempt.document.kinds) if not each.collects)
        return _announce(attempt, resolve(apart.estimate)(workspace))
    return partial(_with_digests, attempt, opened)


def _factors(attempt: Attempt) -> Inputs:
    attempt.workspace.inputs.stored = open_factors(attempt.document, attempt.assignment, attempt.context)
    attempt.workspace.machine.guard.hold()
    return _unnamed


def _unnamed(finished: Finished) -> Finished:
    """Name no model and no data: the digest of stored factors stands in the frame already."""
    return finished


def _layers(attempt: Attempt) -> Inputs:
    take_pieces(attempt)
    return _unnamed


def _pieces(attempt: Attempt) -> Inputs | Divided:
    def named(finished: Finished) -> Finished:
        attempt.notes.take(read_notes(attempt.assignment.pieces))
        return joined_digests(finished, attempt.assignment.pieces)

    return join(attempt) or named


def _model(attempt: Attempt) -> Inputs | Finished | Divided:
    """Load the model and open the data, or those of this attempt's piece."""
    assignment, document, workspace, context = attempt.assignment, attempt.document, attempt.workspace, attempt.context
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
        pieces, said = plan_part(document, data, workspace.inputs)
        return _announce(attempt, {**resolve(ESTIMATE)(workspace, pieces), **said})
    if attempt.extended is not None:
        data = enter_extension(attempt.extended, data, workspace)
    data = enter_piece(attempt, data)
    begins = document.shards is not None and assignment.piece is None
    digests = None if begins else InputDigests(loaded.model, data.batches, document.collection.seed)
    ranks = workspace.machine.ranks
    with workspace.machine.operation("model to device"):
        sharded = document.memory.model_sharding == "on"
        workspace.inputs.model = place_model(loaded.model, workspace.machine.device, ranks, sharded=sharded)
    attempt.pipe.log("info", f"model: {loaded.provenance}")
    if digests is None:
        return divide(attempt, data)
    workspace.inputs.batches = digests.stream
    take_part(workspace.inputs, ranks, document.collection.batch_size, digests.model_sha256)
    if attempt.extended is not None:
        collect_extension(attempt.extended, digests.model_sha256, assignment.scratch, workspace)
    elif assignment.piece is None:
        _use_cache(attempt, digests)
    return partial(_with_digests, attempt, digests)


SOURCES = (
    Source(lambda attempt: not all(ANALYSES[kind].collects for kind in attempt.document.kinds), _images),
    Source(lambda attempt: attempt.document.factors is not None, _factors),
    Source(lambda attempt: attempt.assignment.piece is None and bool(attempt.assignment.pieces), _pieces),
    Source(lambda attempt: getattr(attempt.assignment.piece, "round", None) == "decompose", _layers),
    Source(lambda _: True, _model),
)


def _announce(attempt: Attempt, plan: Mapping[str, Any]) -> Finished:
    """Send the plan of a job that is planned and not run, which is all that is made of it."""
    device = attempt.workspace.machine.device.type
    attempt.pipe.planned({**plan, "device": device, "unmeasured": list(attempt.unmeasured)})
    return Finished()


def plan_part(document: JobDocument, data: DataStream, inputs: ModelInputs) -> tuple[int, Mapping[str, Any]]:
    """Leave the examples of one rank, or of the largest piece, in the inputs of a job that is planned.

    ::

        shards: N         the largest piece of N; the merge of all of them is planned with it
        shards: auto      the undivided collection: how many pieces there will be depends on the devices that are there
        world_size: W     rank 0, which has the most batches, in its part of the host's memory

    Return the number of pieces that are merged, and the entries of the plan that say what its figures are of.
    """
    whole, collection = data.examples, document.collection
    if document.world_size > 1:
        ranks = PlannedRanks(document.world_size)
        inputs.examples_of_all = whole
        inputs.examples = own_examples(whole, ranks, collection.batch_size)
        return 1, {"of_rank": {"world_size": ranks.size, "examples": inputs.examples, "whole": whole}}
    if document.shards is None:
        return 1, {}
    if document.shards == "auto" or whole is None:
        return 1, {"of_piece": {"count": None, "examples": whole, "whole": whole}}
    # data that say how many they are need no pass
    pieces = cut_pieces(measure_extent(data, collection, lambda: None), document.shards)
    inputs.examples = pieces[0].end
    inputs.part = DataPart(begin=0, end=pieces[0].end or 0, examples=whole, batches=data.batches)
    return len(pieces), {"of_piece": {"count": len(pieces), "examples": pieces[0].end, "whole": whole}}


def _use_cache(attempt: Attempt, digests: InputDigests) -> None:
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


def _with_digests(attempt: Attempt, opened: InputDigests | OpenedImages, finished: Finished) -> Finished:
    """Name model and data by their digests; a piece leaves what it has read for the others of its job."""
    ports = attempt.workspace.ports
    data_sha256 = opened.data_sha256(ports.raise_if_cancelled)
    require_same_data(attempt.workspace.machine.ranks, data_sha256)
    if attempt.assignment.piece is not None:
        ports.artifacts.save_json(READ, attempt.read.as_json(attempt.notes.as_json()))
    examples = opened.examples if attempt.read.data is None else attempt.read.queries
    finished = replace(finished, model_sha256=opened.model_sha256, data_sha256=data_sha256, examples=examples)
    return finished if attempt.extended is None else extended_digests(finished, attempt.extended)
