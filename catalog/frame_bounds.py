"""Frame bounds: the longest texts, the largest numbers and the listed words of each type of frame.

The honest process cuts its texts and lists to them before it sends a frame (`cut`). Code that is not ours may hold the
same pipe, so each reader of a frame refuses what is beyond (`require_within`), and the job ends.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, get_args

from catalog.analyses.analysis import CoverageKind
from catalog.record import record
from catalog.requests.pieces import MAX_SHARDS, ROUNDS

MAX_COUNT = 2**53
"""The largest count: the last integer that every reader of JSON holds exactly."""
MAX_TRACE = 32
"""Most calls in the trace of a failure."""
CODE_NAME = r"[\w.<>]{1,200}"
"""The name of a module or function in it: no separator of a path, no blank."""
CACHED_FILES = 50_000
"""Most files of an entry of cached factors."""
_HEXADECIMAL = r"[0-9a-f]{64}"
_FILE_NAME = r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}(/[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}){0,3}"
"""Plain segments of a path, none of which begins with a dot."""
_WORD = r"[a-z][a-z0-9_]{0,63}"
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class FrameBeyond(ValueError):
    """A frame that no process of ours would send."""


@record
class Text:
    """A text of at most so many characters."""

    most: int
    pattern: str | None = None
    """A regular expression that the whole text matches; such a text is not cut."""
    choices: tuple[str, ...] = ()
    """The texts that are allowed; empty allows any."""
    optional: bool = False

    def cut(self, value: Any) -> Any:  # noqa: ANN401 - of any type until it was looked at
        """Return the value, its end left out where it is too long."""
        if not isinstance(value, str) or len(value) <= self.most or self.pattern or self.choices:
            return value
        return value[: self.most - 1] + "…"

    def fits(self, value: Any) -> bool:  # noqa: ANN401
        """Return whether a value is a text."""
        return isinstance(value, str) or (self.optional and value is None)

    def refuses(self, value: str | None) -> str | None:
        """Return what is wrong with a text; None if nothing is."""
        if value is None:
            return None
        shown = repr(value[:40])
        faults = {
            f"has {len(value):,} characters, and at most {self.most:,} are taken": len(value) > self.most,
            "holds characters that no database stores": _UNSTORABLE.search(value) is not None,
            f"is {shown}, and must be one of {', '.join(self.choices)}": self.choices and value not in self.choices,
            f"is {shown}, which is not of its form": self.pattern and re.fullmatch(self.pattern, value) is None,
        }
        return next((why for why, holds in faults.items() if holds), None)


@record
class Count:
    """An integer from 0."""

    optional: bool = False

    def cut(self, value: Any) -> Any:  # noqa: ANN401
        """Return the value."""
        return value

    def fits(self, value: Any) -> bool:  # noqa: ANN401
        """Return whether a value is an integer."""
        return (isinstance(value, int) and not isinstance(value, bool)) or (self.optional and value is None)

    def refuses(self, value: int | None) -> str | None:
        """Return what is wrong with an integer; None if nothing is."""
        return None if value is None or 0 <= value <= MAX_COUNT else f"must be 0 to 2⁵³ (got {str(value)[:40]})"


@record
class Flag:
    """True or false."""

    def cut(self, value: Any) -> Any:  # noqa: ANN401
        """Return the value."""
        return value

    def fits(self, value: Any) -> bool:  # noqa: ANN401
        """Return whether a value is one of the two."""
        return isinstance(value, bool)

    def refuses(self, value: bool) -> str | None:
        """Return None: there is nothing beyond."""


@record
class Entries:
    """A list of texts or objects."""

    most: int
    of: "Text | Members"

    def cut(self, value: Any) -> Any:  # noqa: ANN401
        """Return the list with each entry cut, and a last one that says how many more there were."""
        if not isinstance(value, (list, tuple)):
            return value
        kept = [self.of.cut(each) for each in value[: self.most]]
        if len(value) > self.most and isinstance(self.of, Text):
            kept[-1] = f"and {len(value) - self.most + 1:,} more"
        return tuple(kept)

    def fits(self, value: Any) -> bool:  # noqa: ANN401
        """Return whether a value is a list of such entries."""
        return isinstance(value, (list, tuple)) and all(map(self.of.fits, value))

    def refuses(self, value: Sequence[Any]) -> str | None:
        """Return what is wrong with a list; None if nothing is."""
        if len(value) > self.most:
            return f"has {len(value):,} entries, and at most {self.most:,} are taken"
        return next(
            (f"entry {place} {why}" for place, each in enumerate(value) if (why := self.of.refuses(each))), None
        )


@record
class Members:
    """An object; some of its members have bounds of their own."""

    most_bytes: int | None = None
    """As JSON; None leaves it at the bound of a frame."""
    known: Mapping[str, "Bound"] = field(default_factory=dict)

    def cut(self, value: Any) -> Any:  # noqa: ANN401
        """Return the object with its texts cut."""
        if not isinstance(value, Mapping):
            return value
        return {name: self.known[name].cut(each) if name in self.known else each for name, each in value.items()}

    def fits(self, value: Any) -> bool:  # noqa: ANN401
        """Return whether a value is an object with such members."""
        return isinstance(value, Mapping) and all(
            bound.fits(value[name]) for name, bound in self.known.items() if name in value
        )

    def refuses(self, value: Mapping[str, Any]) -> str | None:
        """Return what is wrong with an object; None if nothing is."""
        for name, bound in self.known.items():
            why = bound.refuses(value[name]) if name in value else None
            if why is not None:
                return f"`{name}` {why}"
        if self.most_bytes is None or (size := len(json.dumps(value))) <= self.most_bytes:
            return None
        return f"has {size:,} bytes, and at most {self.most_bytes:,} are taken"


Bound = Text | Count | Flag | Entries | Members

_KIND, _LAYER, _POINTER = Text(most=64, pattern=_WORD), Text(most=16_384), Text(most=1_000, optional=True)
_MESSAGE = Text(most=4_000)
_CODE_NAME = Text(most=200, pattern=CODE_NAME)
_DIGEST = Text(most=64, optional=True)
_SHA256 = Text(most=64, pattern=_HEXADECIMAL)
_ANYTHING = Members()
_CACHED_FILE: Mapping[str, "Bound"] = {
    "name": Text(most=400, pattern=_FILE_NAME),
    "sha256": _SHA256,
    "size_bytes": Count(),
}
_LINES = Entries(most=1_000, of=Text(most=2_000))
_REFUSED = {
    "kind": _KIND,
    "code": _KIND,
    "message": _MESSAGE,
    "pointer": _POINTER,
    "layer": Text(most=16_384, optional=True),
}

_ADAPTER = {
    "base": Text(most=1_000),
    "base_sha256": _DIGEST,
    "adapter": Text(most=1_000),
    "config_sha256": _SHA256,
    "weights_sha256": _SHA256,
}
_PART: Mapping[str, "Bound"] = {
    "kind": Text(most=16, choices=get_args(CoverageKind)),
    "reason": Text(most=64, pattern=_WORD, optional=True),
    "parameters": Count(),
    "layers": Count(),
    "named": Entries(
        most=8,
        of=Members(
            known={
                "names": Entries(most=4, of=_LAYER),
                "module": _LAYER,
                "why": Text(most=4_000, optional=True),
            }
        ),
    ),
}
_SUMMARY = Members(known={"coverage": Members(known={"parts": Entries(most=64, of=Members(known=_PART))})})

_FIELDS: Mapping[str, Mapping[str, Bound]] = {
    "started": {"environment": Members(most_bytes=2**16)},
    "progress": {
        "stage": _KIND,
        "done": Count(),
        "total": Count(optional=True),
        "unit": Text(most=64, pattern=_WORD),
        "kept": Flag(),
    },
    "planned": {"plan": Members(most_bytes=4 * 2**20)},
    "layer": {"kind": _KIND, "ordinal": Count(), "layer": _LAYER, "outcome": _ANYTHING, "observed": _ANYTHING},
    "artifact": {
        "name": Text(most=1_024),
        "sha256": _SHA256,
        "size_bytes": Count(),
        "media_type": Text(most=100),
    },
    "summary": {"kind": _KIND, "summary": _SUMMARY},
    "log": {"level": Text(most=16, choices=("debug", "info", "warning")), "message": Text(most=2**20)},
    "cache_asked": {"key": _SHA256},
    "cache_filled": {"key": _SHA256, "files": Entries(most=CACHED_FILES, of=Members(known=_CACHED_FILE))},
    "failed": {
        "category": Text(most=16, choices=("usage", "transient", "fatal")),
        "code": _KIND,
        "message": _MESSAGE,
        "pointer": _POINTER,
        "layer": Text(most=16_384, optional=True),
        "detail": Text(most=20_000, optional=True),
        "trace": Entries(
            most=MAX_TRACE, of=Members(known={"module": _CODE_NAME, "line": Count(), "function": _CODE_NAME})
        ),
    },
    "finished": {
        "model_sha256": _DIGEST,
        "data_sha256": _DIGEST,
        "examples": Count(optional=True),
        "factors_sha256": _DIGEST,
        "against_sha256": _DIGEST,
        "refused": Entries(most=64, of=Members(known=_REFUSED)),
        "unused": _LINES,
        "notices": _LINES,
        "reading": Members(most_bytes=2 * 2**20),
        "adapters": Entries(most=1, of=Members(known=_ADAPTER)),
        "reproduction": Text(most=0, optional=True),  # the parent makes it
    },
    "stopped": {},
    "divided": {
        "round": Text(most=16, choices=ROUNDS),
        "pieces": Entries(most=MAX_SHARDS, of=_ANYTHING),
    },
}
BOUNDS = {name: Members(known=fields) for name, fields in _FIELDS.items()}
"""Bounds by type of frame."""


def cut(frame: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the texts and lists of a frame to their bounds, as far as cutting helps."""
    within: dict[str, Any] = BOUNDS[frame["frame"]].cut(frame)
    return within


def require_within(frame: Mapping[str, Any]) -> None:
    """Require that a frame is one that a process of ours might have sent.

    Args:
        frame: The frame as JSON has it, of a known type.

    Raises:
        TypeError: If a field has another type than it should.
        FrameBeyond: If one is longer or larger than its bound, or is not one of those listed.
    """
    bounds = BOUNDS[frame["frame"]]
    wrong = next((name for name, bound in bounds.known.items() if name in frame and not bound.fits(frame[name])), None)
    if wrong is not None:
        raise TypeError(f"`{wrong}` is {type(frame[wrong]).__name__}, or holds what it should not")
    why = bounds.refuses(frame)
    if why is not None:
        raise FrameBeyond(f"a frame `{frame['frame']}` whose {why}")
