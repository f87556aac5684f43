"""A process whose wall clock is off by the seconds in the file beside this one; its monotonic clock is not.

Put first on PYTHONPATH. (libfaketime would be no answer: it breaks sleeping.)
"""

import datetime as dt
import time
from pathlib import Path

_OFF = float(Path(__file__).with_name("seconds").read_text())
_time, _time_ns, _gmtime, _localtime = time.time, time.time_ns, time.gmtime, time.localtime

time.time = lambda: _time() + _OFF
time.time_ns = lambda: _time_ns() + int(_OFF * 1e9)
time.gmtime = lambda secs=None: _gmtime(time.time() if secs is None else secs)
time.localtime = lambda secs=None: _localtime(time.time() if secs is None else secs)


class _AnyDatetime(type):
    """What C code makes are plain datetimes, and must pass for ours."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _datetime)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _datetime)


_datetime = dt.datetime


class _Shifted(_datetime, metaclass=_AnyDatetime):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:
        return _datetime.now(tz) + dt.timedelta(seconds=_OFF)

    @classmethod
    def utcnow(cls) -> dt.datetime:
        return _datetime.now(dt.UTC).replace(tzinfo=None) + dt.timedelta(seconds=_OFF)


_Shifted.__name__ = _Shifted.__qualname__ = "datetime"
dt.datetime = _Shifted
