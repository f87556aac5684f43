"""Division: what an attempt at a divided job does, by the rounds that its pieces have ended.

no round yet        cut the data, plan the collection of a piece, end with ``Divided``
as a piece          collect the sums of its examples, or correct their eigenvalues, or decompose its layers of the
                    merged factors, and store them; or score its queries over the merged factors
`collect` ended     merge; where it pays, end with ``Divided`` into pieces of layers
`decompose` ended   with EK-FAC store the eigenbases, and end with ``Divided`` once more
then                with an analysis of queries, end with ``Divided`` into as many pieces as collected, of whole blocks
all rounds ended    analyse the merged factors, as a job over stored factors does, and join the scores

`shards: auto` takes so many pieces::

    N = min(2 · devices, ⌊seconds of the whole collection / 60⌋, places to cut), at least 1;  1 with one device

Two pieces for each device let a fast one take more than a slow one, and halve what a killed worker loses. A piece loads
the model, probes it and is merged, which takes seconds; below a minute of work that is no longer small beside it. One
device gains nothing from pieces.

The decompositions are divided as well where that saves more than it costs, by m devices that may take pieces, at most
one for each layer; layers that share an A stay together::

    saved = D · (1 − busiest)        cost = start + bytes / throughput

D are the seconds of merge and decompositions by the plan, and `busiest` the part that the busiest of m pieces has
when layers go to pieces by longest processing time first. A piece starts a process, merges its own layers, and its
decompositions are brought to the job.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from catalog.frames import Divided, Finished
from catalog.record import plain
from catalog.requests.assignment import Assignment, FinishedPiece
from catalog.requests.pieces import PIECES_PER_DEVICE, ROUNDS, DecomposeRound, Piece, auto_pieces
from engine.analyses.layer_analysis import make_analysis
from engine.collect import collect_or_read, plan_collection
from engine.distributed.longest_first import divide_longest_first, longest_share
from engine.factors.factor_set import LayerFacts
from engine.measurement.divided_layers import layer_units
from engine.measurement.piece_storage import store_bases, store_correction, store_layers, store_piece
from engine.memory.plan import read_plan
from engine.workspace import DataPart, JobOptions, ModelInputs
from worker.execution.attempt import Attempt
from worker.execution.data.stream import Chunk, DataStream
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.input_digests import composed_digest
from worker.execution.pieces.data_extent import Extent, cut_pieces, measure_extent, read_share
from worker.execution.pieces.extension import collecting
from worker.execution.pieces.read_digests import (
    ReadDigests,
    count_queries,
    require_one_pass,
    require_same_pieces,
)
from worker.execution.refusal import Refusal

LEAST_SECONDS = 60.0
"""Collection that makes a piece worth while."""
START_SECONDS = 20.0
"""Claim, process, imports and opening of the factors."""
BYTES_PER_SECOND = 100e6
"""Rate of a store of artifacts."""
_BYTES_OF_A_VALUE = 4


def most_pieces(devices: int, cuts: int) -> int:
    """Return the number of pieces that `auto` takes where the collection is long."""
    return max(1, min(auto_pieces(devices), cuts))


def choose_count(plan: Mapping[str, Any], planned: int, devices: int, cuts: int) -> tuple[int, str]:
    """Choose the number of pieces."""
    most = most_pieces(devices, cuts)
    if most == 1:
        what = f"{devices} device is" if devices == 1 else f"{devices} devices are"
        return 1, f"{what} at hand, and the data have {cuts} place{'s' if cuts > 1 else ''} to begin a piece"
    foreseen = (plan.get("stages") or {}).get("collection", {}).get("seconds")
    if foreseen is None:
        return most, f"{devices} devices are at hand, and nobody foresees how long the collection takes"
    seconds = foreseen * planned
    count = max(1, min(most, int(seconds // LEAST_SECONDS)))
    limit = (
        f"a piece of less than {LEAST_SECONDS:.0f} s is not worth its start"
        if count < most
        else f"{PIECES_PER_DEVICE} pieces for each of {devices} devices"
    )
    return count, f"the collection takes about {seconds:.0f} s of one device; {limit}"


def with_round(options: JobOptions) -> str | None:
    """Return the analysis with a round of its own; None where none is asked for."""
    return next((kind for kind in options.kinds if getattr(options.of(kind), "has_round", False)), None)


def divide(attempt: Attempt, data: DataStream) -> Divided:
    """Cut the data of a job into pieces, once the plan of a piece is known."""
    document, workspace = attempt.document, attempt.workspace
    if (kind := with_round(workspace.options)) is not None:
        make_analysis(kind, workspace).require()
    extent = measure_extent(data, document.collection, workspace.ports.raise_if_cancelled)
    cuts, log = len(extent.cuts), workspace.ports.log
    asked = most_pieces(attempt.assignment.devices, cuts) if document.shards == "auto" else int(document.shards or 1)
    pieces = cut_pieces(extent, asked)
    whole = workspace.options
    _enter_share(attempt, pieces[0], data)
    plan = plan_collection(workspace, len(pieces), whole)
    if document.shards == "auto":
        count, why = choose_count(plan.as_json(), len(pieces), attempt.assignment.devices, cuts)
        pieces = cut_pieces(extent, count)
        log("info", f"`shards: auto` takes {len(pieces)}: {why}")
    elif len(pieces) < asked:
        log(
            "warning",
            f"`shards` is {asked}, and the {extent.examples} examples can be cut into {len(pieces)} pieces at most, "
            "each of `collection.update_freq` batches or more: the job has that many",
        )
    return _divided(pieces, log)


def enter_piece(attempt: Attempt, data: DataStream) -> DataStream:
    """Put what a piece has in the place of the whole: examples, or queries beside all the data."""
    piece, digests, options = attempt.assignment.piece, attempt.read, attempt.workspace.options
    inputs, kind, batch_size = attempt.workspace.inputs, with_round(options), options.collection.batch_size
    if piece is None:
        return data
    if piece.round != "score" or kind is None or inputs.query is None:
        if inputs.query is not None:
            query, checkpoint = _stream_of(inputs.query), attempt.workspace.ports.raise_if_cancelled
            digests.queries = measure_extent(query, options.collection, checkpoint).examples
        return _enter_share(attempt, piece, data, digests)
    collected, query, digests.data = attempt.assignment.pieces[0].piece, _stream_of(inputs.query), ReadDigests()
    data = read_share(data, replace(collected, begin=0, end=collected.total), batch_size, digests.data)
    inputs.batches, inputs.examples, inputs.labels = data.batches, data.examples, data.labels
    share = read_share(query, piece, options.of(kind).block, digests)
    digests.queries = share.examples
    inputs.query = replace(
        inputs.query, batches=share.batches, examples=share.examples, part=_part(piece, query.batches)
    )
    return data


def _enter_share(attempt: Attempt, piece: Piece, data: DataStream, digests: ReadDigests | None = None) -> DataStream:
    """Put the data of one piece in the place of the whole, and leave the analyses to the job that merges them."""
    workspace, inputs = attempt.workspace, attempt.workspace.inputs
    share = read_share(data, piece, workspace.options.collection.batch_size, digests)
    workspace.options = collecting(workspace.options)
    inputs.batches, inputs.examples, inputs.labels = share.batches, share.examples, share.labels
    inputs.part = _part(piece, data.batches)
    return share


def _stream_of(inputs: ModelInputs) -> DataStream:
    return DataStream(batches=inputs.batches or (lambda: iter(())), examples=inputs.examples)


def _part(piece: Piece, batches: Callable[[], Iterator[Chunk]]) -> DataPart:
    return DataPart(begin=piece.begin or 0, end=piece.end or 0, examples=piece.total or 0, batches=batches)


def compute_piece(attempt: Attempt, piece: Piece) -> None:
    """Compute one piece, and store it as artifacts."""
    workspace = attempt.workspace
    if piece.round == "decompose":
        store_layers(workspace, piece.layers or ())
    elif piece.round == "correct":
        workspace.inputs.bases = _stored_by_job(attempt.assignment)
        store_correction(workspace)
    elif piece.round == "score" and (kind := with_round(workspace.options)) is not None:
        _take_corrections(take_pieces(attempt)[2], attempt)
        workspace.options = replace(workspace.options, kinds=(kind,), keep=(), decomposition="none")
        collect_or_read(workspace)
        plan_collection(workspace, len(workspace.inputs.stored_pieces), workspace.options)
        make_analysis(kind, workspace).begin()
    else:
        store_piece(workspace)


def join(attempt: Attempt) -> Divided | None:
    """Take the pieces of the rounds that have ended as the job's factors."""
    workspace, plan = attempt.workspace, attempt.assignment.plan
    collected, decomposed, corrected, scored = take_pieces(attempt)
    if plan is not None:
        # what is measured from here on stands beside what the job's first attempt has planned
        workspace.machine.curve.stages.plan = read_plan(plan)
    later = decomposed or corrected or scored
    if not later and (divided := _divide_decompositions(len(collected), attempt)):
        return divided
    if attempt.document.collection.ekfac and not corrected:
        store_bases(workspace)
        return _divided(tuple(replace(each.piece, round="correct") for each in collected), workspace.ports.log)
    _take_corrections(corrected, attempt)
    kind = with_round(workspace.options)
    if kind is not None and not scored:
        queries, block = count_queries(collected), workspace.options.of(kind).block
        extent = Extent(examples=queries, cuts=tuple(range(0, queries, block)))
        pieces = cut_pieces(extent, min(len(collected), len(extent.cuts)), "score")
        return _divided(pieces, workspace.ports.log)
    workspace.inputs.stored_scores = tuple(ArtifactFiles(each.path, None) for each in scored)
    return None


def _take_corrections(corrected: tuple[FinishedPiece, ...], attempt: Attempt) -> None:
    """Take EK-FAC's eigenvalues, where pieces have corrected them, in the bases that the job has stored."""
    if corrected:
        inputs = attempt.workspace.inputs
        inputs.bases = _stored_by_job(attempt.assignment)
        inputs.stored_corrections = tuple(ArtifactFiles(each.path, None) for each in corrected)


def take_pieces(attempt: Attempt) -> tuple[tuple[FinishedPiece, ...], ...]:
    """Take what pieces have collected as the job's factors, and what they have decomposed of them."""
    pieces, workspace = attempt.assignment.pieces, attempt.workspace
    _require_one_job(pieces, with_round(workspace.options))
    found = tuple(tuple(each for each in pieces if each.piece.round == name) for name in ROUNDS)
    inputs = workspace.inputs
    inputs.stored_pieces, inputs.stored_decompositions = (
        tuple(ArtifactFiles(each.path, None) for each in own) for own in found[:2]
    )
    workspace.machine.guard.hold()
    return found


def _divide_decompositions(collected: int, attempt: Attempt) -> Divided | None:
    """The round over layers, where it pays."""
    assignment, options, log = attempt.assignment, attempt.workspace.options, attempt.workspace.ports.log
    if options.decomposition == "none" and not options.collection.ekfac:
        return None
    given = Circumstances(
        wanted=assignment.decompose_round,
        collected=collected,
        devices=assignment.devices,
        plan=assignment.plan,
        vectors=options.decomposition == "vectors" or options.collection.ekfac,
    )
    pieces, why = divide_decompositions(collect_or_read(attempt.workspace).layers, given)
    if not pieces:
        log("info", f"the job decomposes its layers itself: {why}")
        return None
    layers = [len(piece.layers or ()) for piece in pieces]
    log(
        "info",
        f"round `decompose`: {len(pieces)} pieces of {sum(layers)} layers, {min(layers)} to {max(layers)} each: {why}",
    )
    return Divided(round="decompose", pieces=tuple(plain(each) for each in pieces))


def joined_digests(finished: Finished, pieces: tuple[FinishedPiece, ...]) -> Finished:
    """Return the last frame of a divided job with the digests that its pieces' are composed to."""
    collected = [each for each in pieces if each.piece.round == "collect"]
    return replace(
        finished,
        model_sha256=collected[0].model_sha256,
        data_sha256=composed_digest([each.data_sha256 for each in collected]),
        examples=sum(each.examples or 0 for each in collected),
    )


def _divided(pieces: tuple[Piece, ...], log: Callable[[str, str], None]) -> Divided:
    first, last = pieces[0], pieces[-1]
    log(
        "info",
        f"round `{first.round}`: {len(pieces)} piece{'s' if len(pieces) > 1 else ''} of the {last.end} {first.unit}, "
        f"from {(last.end or 0) - (last.begin or 0)} to {(first.end or 0) - (first.begin or 0)} each",
    )
    return Divided(round=first.round, pieces=tuple(plain(each) for each in pieces))


def _stored_by_job(assignment: Assignment) -> ArtifactFiles:
    if assignment.divided is None:
        raise ValueError("a job after its first round is told where its own artifacts are, by `divided`")
    return ArtifactFiles(assignment.divided, None)


def _require_one_job(pieces: tuple[FinishedPiece, ...], kind: str | None) -> None:
    """Refuse pieces of different models, of data or queries that differ, and with others than they were given."""
    measured = [each for each in pieces if each.piece.round != "decompose"]
    first = measured[0]
    for each in measured:
        if each.model_sha256 != first.model_sha256:
            raise Refusal(
                f"is not the same in every piece: {first.piece.title} of round `{first.piece.round}` measured the "
                f"digest {first.model_sha256}, and {each.piece.title} of round `{each.piece.round}` {each.model_sha256}"
                "; a factory must return the same weights every time: seed what it draws, or load a file",
                pointer="/model",
                code="model_differs",
            )
        if each.examples != (each.piece.end or 0) - (each.piece.begin or 0):
            raise Refusal(
                f"{each.piece.title} of round `{each.piece.round}` has the {each.piece.unit} {each.piece.begin} to "
                f"{each.piece.end}, and read {each.examples}; the source must give the same examples every time",
                pointer="/data",
                code="data_differ",
            )
    collected, _, corrected, scored = ([each for each in measured if each.piece.round == name] for name in ROUNDS)
    require_one_pass(collected)
    require_same_pieces(collected, corrected)
    require_one_pass(scored, "query", f"/{kind}/query")
    require_same_pieces(collected[-1:] * len(scored), scored)


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The circumstances that the choice depends on besides the layers."""

    wanted: DecomposeRound
    collected: int
    """Pieces of the round `collect`."""
    devices: int
    """Devices that may take pieces."""
    plan: Mapping[str, Any] | None
    """The job's plan."""
    vectors: bool
    """Whether eigenvectors are asked for."""


def divide_decompositions(layers: Sequence[LayerFacts], given: Circumstances) -> tuple[tuple[Piece, ...], str]:
    """Divide layers into the pieces of a round."""
    if given.collected < 2:
        return (), "the job was collected in one piece"
    if given.wanted == "never":
        return (), "the operator has switched the round `decompose` off"
    units = layer_units(layers)
    costs = [cost for cost, _ in units]
    wanted = given.devices if given.wanted == "auto" else max(given.devices, given.collected)
    count = min(wanted, sum(cost > 0 for cost in costs))
    if count < 2:
        what = f"{given.devices} device{'s are' if given.devices != 1 else ' is'} at hand"
        return (), f"{what}, and {len(units)} group{'s' if len(units) != 1 else ''} of layers can be decomposed apart"
    busiest = longest_share(costs, count)
    why = "the operator asks for it in any case"
    if given.wanted == "auto":
        pays, why = _weigh(layers, given, count, busiest)
        if not pays:
            return (), why
    return _pieces(units, divide_longest_first(costs, count)), why


def _weigh(layers: Sequence[LayerFacts], given: Circumstances, count: int, busiest: float) -> tuple[bool, str]:
    seconds = ((given.plan or {}).get("stages") or {}).get("decomposition", {}).get("seconds")
    if seconds is None:
        return False, "nobody foresees how long decompositions take"
    saved, cost = seconds * (1 - busiest), START_SECONDS + _moved_bytes(layers, given) / BYTES_PER_SECOND
    why = (
        f"decompositions take about {seconds:.0f} s, of which {count} pieces save {saved:.0f} s, and to start them and "
        f"bring what they make takes {cost:.0f} s"
    )
    return saved > cost, why


def _moved_bytes(layers: Sequence[LayerFacts], given: Circumstances) -> float:
    """Triangles of every piece of `collect`, and the eigenvectors that come back."""
    numbers = sum(facts.in_dim**2 + facts.out_dim**2 for facts in layers)
    return _BYTES_OF_A_VALUE * numbers * (given.collected / 2 + (1 if given.vectors else 0))


def _pieces(units: Sequence[tuple[float, tuple[LayerFacts, ...]]], division: Sequence[int]) -> tuple[Piece, ...]:
    """One piece for each worker, its layers in the model's order; layers that cost nothing go with the others."""
    named: dict[int, list[LayerFacts]] = {}
    for (_, unit), worker in zip(units, division, strict=True):
        named.setdefault(worker, []).extend(unit)
    count = len(named)
    return tuple(
        Piece(
            round="decompose",
            index=index,
            count=count,
            layers=tuple(facts.name for facts in sorted(named[worker], key=lambda facts: facts.ordinal)),
        )
        for index, worker in enumerate(sorted(named))
    )
