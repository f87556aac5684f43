"""Caller code: the modules of a job's factories, and the calls of a traceback that are theirs.

A service's caller may not be the author of a factory that its operator lists. So a trace holds names and numbers alone:
no path, no line of source, no value, and no call of ours or of a library. The whole traceback is the failure's detail.
"""

import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from catalog.frame_bounds import CODE_NAME, MAX_TRACE
from catalog.requests.assignment import Assignment
from catalog.responses.caller_frame import CallerFrame
from worker.execution.resolve import OUR_MODULES

_LIBRARIES = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, kw_only=True)
class CallerCode:
    """The modules that are a caller's: those of the factories' packages, and those in the folders of factories."""

    packages: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, assignment: Assignment) -> Self:
        """Return the code of the factories that a document names, which nobody has judged yet."""
        document = assignment.document if isinstance(assignment.document, Mapping) else {}
        blocks = [document.get(name) for name in ("model", "data")]
        factories = [block.get("factory") for block in blocks if isinstance(block, Mapping)]
        packages = {re.split("[.:]", name)[0] for name in factories if isinstance(name, str)}
        return cls(packages=frozenset(packages) - OUR_MODULES, folders=tuple(assignment.paths) if packages else ())

    def trace(self, error: BaseException) -> tuple[CallerFrame, ...]:
        """Return the calls of the caller's code that an exception came through, the innermost last.

        Args:
            error: The exception, which another may be the cause of; the first with such calls counts.
        """
        for each in _causes(error):
            frames = [
                CallerFrame(module=_name(_module(frame)), line=line, function=_name(frame.f_code.co_qualname))
                for frame, line in traceback.walk_tb(each.__traceback__)
                if self._holds(frame)
            ]
            if frames:
                return tuple(frames[-MAX_TRACE:])
        return ()

    def _holds(self, frame: FrameType) -> bool:
        top = _module(frame).partition(".")[0]
        if top in self.packages:
            return True
        if top in OUR_MODULES or top in sys.stdlib_module_names:
            return False
        file = Path(frame.f_code.co_filename)
        below = next((folder for folder in self.folders if file.is_relative_to(folder)), None)
        return below is not None and _LIBRARIES.isdisjoint(file.relative_to(below).parts)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from, each once."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__


def _module(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else "?"  # whatever code has put there


def _name(text: str) -> str:
    """Return a name as a trace holds one; a question mark for what code has put in its place."""
    return text if re.fullmatch(CODE_NAME, text) else "?"
