"""Lineage: the jobs whose factors a job used, those that used its own, and its history.

A source is named by the document, or is the job whose collection the cache gave. Every statement names the tenant: of
another tenant's job no more is known than of an id that is none.
"""

from typing import Any

from sqlalchemy import ColumnElement, Engine, Row, Text, and_, cast, null, or_, select, tuple_

from catalog import ANALYSES
from catalog.requests.estimate import ESTIMATE
from catalog.responses.views import EventView, LineageView, RelativeView, timestamp
from jobs.lifecycle import OPEN
from jobs.schema.database import reading
from jobs.schema.identifiers import is_id
from jobs.schema.tables import job_events, jobs

NAMING = {
    **{name: (name, "job") for name in ("factors", "extends")},
    **{f"{kind}.against": (kind, "against", "job") for kind in ANALYSES if hasattr(ANALYSES[kind].params, "against")},
}
"""Fields of a document that name a job whose factors it needs, by relation."""
_MOST = 100
_DOCUMENT = {relation: jobs.c.document[path].as_string() for relation, path in NAMING.items()}
_RELATIONS = {**_DOCUMENT, "cache": jobs.c.factors_from}
_ROW = select(
    *(jobs.c.id, jobs.c.name, jobs.c.state, jobs.c.kind), *(each.label(name) for name, each in _RELATIONS.items())
).where(jobs.c.kind != ESTIMATE)


def read_lineage(engine: Engine, tenant_id: str, job_id: str) -> LineageView | None:
    """Return what a job used, what used it, and its states and attempts; None if this tenant has no such job."""
    mine, events = jobs.c.tenant_id == tenant_id, job_events.c
    # the text is searched faster than it is parsed
    naming = and_(cast(jobs.c.document, Text).contains(job_id), or_(*(each == job_id for each in _DOCUMENT.values())))
    users = _ROW.where(mine, jobs.c.piece.is_(null()), or_(naming, jobs.c.factors_from == job_id))
    own = (events.tenant_id == tenant_id, events.job_id == job_id, events.type.in_(("state", "started", "crash")))
    with reading(engine, tenant_id) as connection:
        row = connection.execute(_ROW.where(mine, jobs.c.id == job_id)).one_or_none() if is_id(job_id) else None
        if row is None:
            return None
        named = {row._mapping[each]: each for each in _RELATIONS if is_id(row._mapping[each] or "")}  # noqa: SLF001 - SQLAlchemy's documented name
        known = {each.id: each for each in connection.execute(_ROW.where(mine, jobs.c.id.in_(named)))}
        later = connection.execute(users.order_by(jobs.c.id.desc()).limit(_MOST)).all()
        told = connection.execute(select(job_events).where(*own).order_by(events.seq.desc()).limit(_MOST)).all()
    return LineageView(
        sources=tuple(_relative(each, relation, known.get(each)) for each, relation in named.items()),
        users=tuple(_relative(each.id, _relation(each, job_id), each) for each in later),
        history=tuple(
            EventView(seq=each.seq, at=timestamp(each.at), type=each.type, data=each.data) for each in reversed(told)
        ),
    )


def unnamed() -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that no open job needs a job's factors."""
    later = jobs.alias("later")
    # nothing in them depends on the job that is asked for, so that each is found out once for all of them
    return tuple(
        tuple_(jobs.c.tenant_id, jobs.c.id).not_in(
            select(later.c.tenant_id, named).where(later.c.state.in_(OPEN), named.is_not(None))
        )
        for named in (later.c.document[path].as_string() for path in NAMING.values())
    )


def _relation(row: Row[Any], source: str) -> str:
    return next(each for each in _RELATIONS if row._mapping[each] == source)  # noqa: SLF001 - likewise


def _relative(job_id: str, relation: str, row: Row[Any] | None) -> RelativeView:
    if row is None:
        return RelativeView(id=job_id, relation=relation, name=None, state=None, kinds=())
    return RelativeView(id=job_id, relation=relation, name=row.name, state=row.state, kinds=tuple(row.kind.split(",")))
