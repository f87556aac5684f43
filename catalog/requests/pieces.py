"""Pieces of a divided job: the examples, or the layers, that one child job of a round takes.

A job with `shards: N` cuts its data by example index into N contiguous ranges [begin, end) that end at batch
boundaries. Each piece collects the sums over its own examples, under the indices that they have in the whole data, and
the job merges the sums in the order of the pieces. So the option is refused with whatever is not a sum over examples.

    collect     the factors of the examples [begin, end)
    decompose   the eigendecompositions of some layers of the merged factors
    correct     EK-FAC's eigenvalues of the same examples, in the eigenbases of the merged factors
    score       the queries [begin, end) of an analysis that passes over all the data for each block of them
"""

from collections.abc import Mapping
from typing import Any, Literal

from catalog.record import FieldError, record
from catalog.record_reader import read

Round = Literal["collect", "decompose", "correct", "score"]
Shards = int | Literal["auto"]

ROUNDS: tuple[Round, ...] = ("collect", "decompose", "correct", "score")
"""In the order in which a job takes them."""
MAX_SHARDS = 4096
PIECES_PER_DEVICE = 2
"""Most pieces for each device, of a job with `shards: auto`."""
DecomposeRound = Literal["auto", "always", "never"]
"""Whether the decompositions of a divided job are divided as well: where that takes less time, or in any case."""


@record
class Piece:
    """The part of a divided job that one child job computes."""

    round: Round
    """The round that the piece belongs to."""
    index: int
    """Place among the pieces of the round, from 0; results are merged in this order."""
    count: int
    """Pieces of the round."""
    begin: int | None = None
    """Index of the first example, or query in the round `score`; null in a round over layers."""
    end: int | None = None
    """Index after the last one; null in a round over layers."""
    total: int | None = None
    """Examples of the whole data, or all queries; null in a round over layers."""
    layers: tuple[str, ...] | None = None
    """Names of the layers; null in a round over examples."""

    def __post_init__(self) -> None:
        """Refuse a place outside the round, and a piece of neither examples nor layers, or of both."""
        if self.round not in ROUNDS:
            raise FieldError("round", f"must be one of {', '.join(ROUNDS)} (got {self.round!r})")
        if self.count < 1:
            raise FieldError("count", f"must be at least 1 (got {self.count})")
        if not 0 <= self.index < self.count:
            raise FieldError("index", f"must be 0 to {self.count - 1} in a round of {self.count} (got {self.index})")
        if self.round == "decompose":
            if not self.layers or self.begin is not None or self.end is not None:
                raise FieldError("layers", "must name at least one layer, and no examples, in the round `decompose`")
        elif self.layers is not None or not 0 <= (self.begin or 0) < (self.end or 0) <= (self.total or 0):
            raise FieldError(
                "begin",
                f"must be an example before `end`, which is at most `total`, and without layers, in the round "
                f"`{self.round}` (got begin {self.begin}, end {self.end}, total {self.total})",
            )

    @property
    def title(self) -> str:
        """The place as people count: `piece 3 of 6`."""
        return f"piece {self.index + 1} of {self.count}"

    @property
    def unit(self) -> str:
        """The plural of what a piece has that is not of layers."""
        return "queries" if self.round == "score" else "examples"


def most_pieces_of(name: Round | str, shards: Shards, devices: int, collected: int) -> int:
    """Return the most pieces that a round can have on so many devices that could compute at once.

    Of a later round one for each device, or two for each piece that was collected where that is more.
    """
    if name == "collect":
        return auto_pieces(devices) if shards == "auto" else shards
    return max(devices, 2 * collected)


def auto_pieces(devices: int) -> int:
    """Return the pieces that `shards: auto` takes at most, of devices that could compute at once.

    Two for each, since a fast one may then take more than a slow one; 1 for one, which gains nothing.
    """
    return PIECES_PER_DEVICE * devices if devices > 1 else 1


def read_piece(value: Mapping[str, Any]) -> Piece:
    """Read a piece from JSON; a ``FieldError`` says that it is none."""
    piece: Piece = read(Piece, value, "")
    return piece


def require_shards(shards: Shards | None) -> None:
    """Raise ``FieldError`` for a number of pieces outside 1 to `MAX_SHARDS`."""
    if isinstance(shards, int) and not 1 <= shards <= MAX_SHARDS:
        raise FieldError(
            "shards", f"is {shards}; take 1 to {MAX_SHARDS}, `auto`, or leave it out for a job that is not divided"
        )


def require_divisible(document: Any) -> None:  # noqa: ANN401 - a job document, whose module imports this one
    """Refuse `shards` where what is asked for is not a sum over examples, or is divided in another way.

    Raises:
        FieldError: If the document has `shards` and cannot be divided.
    """
    require_shards(document.shards)
    if document.shards is None:
        return
    if document.factors is not None:
        raise FieldError("shards", "divides a collection, and `factors` were collected already; leave `shards` out")
    world_size = getattr(document, "world_size", None) or 1
    if world_size > 1:
        raise FieldError(
            "shards",
            f"contradicts `world_size: {world_size}`: a job is divided over workers or over the devices of one of "
            "them; leave one of the two out",
        )
    if document.collection.ema_decay is not None:
        raise FieldError(
            "collection.ema_decay",
            "weighs each batch by how many follow it, which no piece knows, and `shards` divides the data; give null, "
            "or leave `shards` out",
        )
    again = (
        "divides the data, and `{}` passes over all of it after the collection; keep the factors, and ask for it in a "
        "job of its own without `shards`"
    )
    require_one_pass(document, "shards", again, "all the data, which `shards` divides", "leave `shards` out")


def require_one_pass(document: Any, option: str, again: str, data: str, remedy: str) -> None:  # noqa: ANN401 - see above
    """Refuse an analysis that passes over the data after the collection, where no process has all of them.

    Args:
        document: The job document.
        option: The option that divides them.
        again: What is wrong with a further pass; `{}` stands for the option that asks for it.
        data: The data that a gradient would be taken of.
        remedy: The alternative to a gradient from a file.

    Raises:
        FieldError: On `option`, or on the gradient that is missing.
    """
    for params in (getattr(document, kind, None) for kind in document.kinds):
        # pieces of a round of its own pass over all the data
        apart = option == "shards" and getattr(params, "has_round", False)
        if (asked := getattr(params, "needs_model", None)) is not None and not apart:
            raise FieldError(option, again.format(asked))
        if (field := getattr(params, "needs_gradient", None)) is not None:
            sentence = f"is missing, so the gradient is taken of {data}: give `gradient: {{path: FILE.safetensors}}`"
            raise FieldError(field, f"{sentence}, or {remedy}")
