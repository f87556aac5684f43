"""Frames from the process that computes to the process that writes: one JSON object a line.

The child holds no database credentials and writes nothing but artifacts; its parent (the
worker's supervisor, or the foreground runner of the CLI) is the only sink.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from catalog.analyses.analysis import LayerResult, RefusedAnalysis
from catalog.frame_bounds import cut, require_within
from catalog.record import FieldError, canonical_json, option, plain, record
from catalog.record_reader import read
from catalog.requests.cached_factors import CachedFile
from catalog.requests.data_sources import Pixels
from catalog.responses.reproduction import Reproduction
from catalog.responses.views import CallerFrame

MAX_FRAME_BYTES = 8 * 2**20
_MOST_WARNING = 500


@record
class Started:
    """First frame: what computes, and with what."""

    frame: Literal["started"] = "started"
    environment: Mapping[str, Any]
    """Versions, device, threads, platform: the manifest's part that the child knows."""


@record
class Progress:
    """How far a stage is."""

    frame: Literal["progress"] = "progress"
    stage: str
    """`model`, `data`, `collection`, `cross_check`, `products`, or an analysis's kind."""
    done: int
    total: int | None
    unit: str
    """`batches`, `layers`, or `episodes` of a training."""
    kept: bool = False
    """Whether a checkpoint holds all that is done, so that a later attempt goes on from there."""


@record
class Planned:
    """The memory plan, made before anything large is allocated."""

    frame: Literal["planned"] = "planned"
    plan: Mapping[str, Any]


@record
class LayerDone:
    """One row, complete."""

    frame: Literal["layer"] = "layer"
    kind: str
    ordinal: int
    layer: str
    outcome: Mapping[str, Any]
    """Everything reproducible; the ledger's digest covers it."""
    observed: Mapping[str, Any]


@record
class ArtifactWritten:
    """A file stands complete under the output folder."""

    frame: Literal["artifact"] = "artifact"
    name: str
    """Path below the artifact folder, with forward slashes."""
    sha256: str
    size_bytes: int
    media_type: str


@record
class Summarised:
    """One analysis has ended."""

    frame: Literal["summary"] = "summary"
    kind: str
    summary: Mapping[str, Any]


@record
class LogLine:
    """A line for the job's log."""

    frame: Literal["log"] = "log"
    level: Literal["debug", "info", "warning"]
    message: str


@record
class Failed:
    """Last frame of a job that could not be done."""

    frame: Literal["failed"] = "failed"
    category: Literal["usage", "transient", "fatal"]
    """Who acts: the caller, we (by retrying), the operator."""
    code: str
    message: str
    pointer: str | None
    """JSON pointer into the document, where a field is to blame."""
    layer: str | None
    detail: str | None
    """For the operator: never shown to the caller of a service."""
    trace: tuple[CallerFrame, ...] = ()
    """Calls in a factory's own code that it was raised under, the innermost last."""


@record
class AppliedAdapter:
    """An adapter that was applied to a model."""

    base: str
    """The model below it: its folder, or its name on the hub with the commit."""
    base_sha256: str | None
    """`model_sha256` of that model alone; null where it lacks tensors that the adapter brings, such as a head."""
    adapter: str
    """The adapter: its folder, or its name on the hub with the commit."""
    config_sha256: str
    """Digest of `adapter_config.json`."""
    weights_sha256: str
    """Digest of `adapter_model.safetensors`."""
    merged: bool
    """Whether it was added into the weights."""


@record
class NumberedLabels:
    """Names of classes and the number of each."""

    order: Literal["id2label", "sorted"]
    """`id2label`: as the config.json of the model numbers them; `sorted`: by the alphabet, as it has no names."""
    names: int
    """How many the data have."""
    numbers: Mapping[str, int]
    """The number of each name; of very many the first."""


@record
class Reading:
    """How data were read."""

    columns: Mapping[str, str] = option(dict)
    """Columns of a table by what they were read as: `text`, `pair`, `label`."""
    labels: NumberedLabels | None = None
    """Names of classes; null where the data have numbers."""
    pixels: Pixels | None = None
    """How pixels became numbers; null where they are taken as they are."""


@record
class Finished:
    """Last frame of a job that is done."""

    frame: Literal["finished"] = "finished"
    model_sha256: str | None = None
    """Digest of the model's parameters and buffers; null where stored factors were analysed, and of an estimate."""
    data_sha256: str | None = None
    """Digest of one whole pass over the data, in order."""
    examples: int | None = None
    """Examples of that pass."""
    factors_sha256: str | None = None
    """Digest of the stored factors that were analysed: over the names and digests of their layers."""
    against_sha256: str | None = None
    """The same of the set that they were compared with."""
    refused: tuple[RefusedAnalysis, ...] = ()
    """Analyses that were refused while others were done."""
    unused: tuple[str, ...] = ()
    """What lies in the model's folder or in the data, and was not used."""
    notices: tuple[str, ...] = ()
    """What was read otherwise than it stands there, in a way that changes numbers."""
    reading: Reading = option(Reading)
    """How the data were read."""
    adapters: tuple[AppliedAdapter, ...] = ()
    """The adapter that was applied to the model; empty where there was none, and for a job of pieces, whose manifests
    have it."""
    reproduction: Reproduction | None = None
    """The comparison with the run that the document reproduces, which the parent makes."""


@record
class Stopped:
    """Last frame of a job that stopped because it was asked to."""

    frame: Literal["stopped"] = "stopped"


@record
class Divided:
    """Last frame of an attempt that leaves the next round to child jobs: it goes on when they have succeeded."""

    frame: Literal["divided"] = "divided"
    round: str
    """`collect`, `correct`, `decompose` or `score`, as in `catalog.requests.pieces`."""
    pieces: tuple[Mapping[str, Any], ...]
    """The pieces of the round in their order, each with the fields of `catalog.requests.pieces.Piece`."""


@record
class CacheAsked:
    """A question for the cached factors of the job's collection; the child waits for a `CacheAnswer`."""

    frame: Literal["cache_asked"] = "cache_asked"
    key: str
    """The key of the collection."""


@record
class CacheFilled:
    """The files of a new entry stand complete in the folder for them, for the parent to publish or to leave."""

    frame: Literal["cache_filled"] = "cache_filled"
    key: str
    files: tuple[CachedFile, ...]


Frame = (
    Started
    | Progress
    | Planned
    | LayerDone
    | ArtifactWritten
    | Summarised
    | LogLine
    | CacheAsked
    | CacheFilled
    | Failed
    | Finished
    | Stopped
    | Divided
)

_FRAMES: dict[str, type[Frame]] = {each.frame: each for each in get_args(Frame)}


@record
class CacheAnswer:
    """The parent's answer to a `CacheAsked`, the only message that goes down to the child."""

    job: str | None
    """The job whose factors now stand, verified, in the folder that the assignment names; None without an entry."""
    warning: str | None = None
    """What is wrong with an entry that is not used, for the job's log."""


def layer_frame(result: LayerResult) -> LayerDone:
    """Return the frame of one row, with `outcome`, which digests are taken of, apart from what was observed."""
    outcome = plain(result)
    observed = outcome.pop("observed")
    return LayerDone(kind=result.kind, ordinal=result.ordinal, layer=result.layer, outcome=outcome, observed=observed)


def encode(frame: Frame) -> bytes:
    """Encode a frame as one line of JSON, its texts and lists cut to their bounds.

    Returns:
        The line in UTF-8, with its end.

    Raises:
        ValueError: If a number is NaN or infinite, or the line would be longer than 8 MiB.
    """
    line = canonical_json(cut(plain(frame))).encode() + b"\n"
    if len(line) > MAX_FRAME_BYTES:
        message = f"a frame of {len(line):,} bytes; at most {MAX_FRAME_BYTES:,} cross the pipe"
        raise ValueError(message)
    return line


def decode(line: bytes) -> Frame:
    """Read the frame in one line.

    Args:
        line: The line in UTF-8, with or without its end.

    Returns:
        The frame.

    Raises:
        ValueError: If it is not a frame of this vocabulary.
        FrameBeyond: If it is one, and says what no process of ours would.
    """
    value = json.loads(line, parse_constant=_finite, parse_float=_finite)
    try:
        require_within(value)
        frame: Frame = read(_FRAMES[value["frame"]], value, "")
    except (KeyError, TypeError, FieldError) as error:
        message = f"not a frame: {error}"
        raise ValueError(message) from error
    return frame


def encode_answer(answer: CacheAnswer) -> bytes:
    """Encode an answer as one line of JSON in UTF-8, short enough for any pipe to take at once."""
    warning = None if answer.warning is None else answer.warning[:_MOST_WARNING]
    return canonical_json({"job": answer.job, "warning": warning}).encode() + b"\n"


def decode_answer(line: bytes) -> CacheAnswer:
    """Read the answer in one line in UTF-8; a line that was cut off with its writer stands for no entry."""
    return CacheAnswer(**json.loads(line)) if line.endswith(b"\n") else CacheAnswer(job=None)


def _finite(text: str) -> float:
    """A number that the ledger can store; `NaN` and `1e999` come only from a writer that is not ours."""
    number = float(text)
    if not math.isfinite(number):
        message = "a number in a frame is NaN or infinite"
        raise ValueError(message)
    return number
