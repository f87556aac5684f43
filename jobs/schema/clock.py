"""The one clock that counts, the database's, and how its moments are stored.

No process's own clock decides anything, so a machine that is two hours off steals no lease. The database's own may be
set back: moments that must follow one another are `ledger_now_after`.
"""

import math
from datetime import MAXYEAR, UTC, datetime
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, DateTime, Dialect, Double, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine


class Moment(TypeDecorator[datetime]):
    """A point in time: timestamptz on PostgreSQL, seconds since 1970 as a double on SQLite.

    SQLite's own CURRENT_TIMESTAMP steps in whole seconds, too coarse to order events and leases.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose the column's type: a double on SQLite, timestamptz elsewhere."""
        return dialect.type_descriptor(Double() if dialect.name == "sqlite" else DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:  # noqa: ANN401 - as overridden
        """Convert a moment with a time zone to seconds since 1970 on SQLite; elsewhere it stays, as None does."""
        return value.timestamp() if value is not None and dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ANN401 - as overridden
        """Convert a stored value, seconds since 1970 on SQLite, to a moment in UTC; None stays None."""
        if value is None:
            return None
        return datetime.fromtimestamp(value, UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


class ShownMoment(Moment):
    """A moment to compare stored ones with: of those that are shown as it, none counts as earlier.

    A double of SQLite's is shown rounded to microseconds, so that it may lie on either side of what is shown.
    """

    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:  # noqa: ANN401 - as overridden
        """Convert a moment to the first double that is shown as it; elsewhere than on SQLite it stays."""
        if value is None or dialect.name != "sqlite":
            return value
        first = value.timestamp() - 1e-6
        if value.year == MAXYEAR:
            # its last second has a double that is read as no moment
            return first
        while datetime.fromtimestamp(first, UTC) < value:
            first = math.nextafter(first, math.inf)
        return first


_SQLITE_NOW = "(julianday('now') - 2440587.5) * 86400.0"


class _LedgerNow(FunctionElement[datetime]):
    inherit_cache = True
    name = "ledger_now"
    type = Moment()


@compiles(_LedgerNow, "postgresql")
def _now_postgresql(element: _LedgerNow, compiler: SQLCompiler, **options: Any) -> str:  # noqa: ANN401 - passed on
    return f"(clock_timestamp() + make_interval(secs => {compiler.process(element.clauses, **options)}))"


@compiles(_LedgerNow, "sqlite")
def _now_sqlite(element: _LedgerNow, compiler: SQLCompiler, **options: Any) -> str:  # noqa: ANN401 - passed on
    return f"({_SQLITE_NOW} + {compiler.process(element.clauses, **options)})"


def ledger_now(offset_seconds: float | BindParameter[float] = 0) -> FunctionElement[datetime]:
    """Return the database's clock as an SQL expression, so many seconds later, or earlier where they are negative."""
    if isinstance(offset_seconds, BindParameter):
        return _LedgerNow(offset_seconds)
    return _LedgerNow(literal(float(offset_seconds), Double()))


class _LedgerNowAfter(FunctionElement[datetime]):
    inherit_cache = True
    name = "ledger_now_after"
    type = Moment()


@compiles(_LedgerNowAfter, "postgresql")
def _after_postgresql(element: _LedgerNowAfter, compiler: SQLCompiler, **options: Any) -> str:  # noqa: ANN401 - passed on
    moment, seconds = (compiler.process(each, **options) for each in element.clauses)
    return f"greatest(clock_timestamp(), ({moment})::timestamptz + make_interval(secs => {seconds}))"


@compiles(_LedgerNowAfter, "sqlite")
def _after_sqlite(element: _LedgerNowAfter, compiler: SQLCompiler, **options: Any) -> str:  # noqa: ANN401 - passed on
    moment, seconds = (compiler.process(each, **options) for each in element.clauses)
    return f"max({_SQLITE_NOW}, coalesce(({moment}) + {seconds}, 0))"


def ledger_now_after(moment: ColumnElement[Any], seconds: float = 0) -> FunctionElement[datetime]:
    """Return the database's clock, or so many seconds after a stored moment if it was set back to before that.

    A moment that is NULL is ignored.
    """
    return _LedgerNowAfter(moment, literal(float(seconds), Double()))
