"""Series by fork and join: after the last checkpoint's job neighbours are compared, and after the last pair it ends.

A series is `waiting` from its submission on, and no attempt is made of it. Its checkpoints are jobs with documents of
their own, and so are the comparisons of each with the one before; one that fails leaves a gap. Two that succeed and are
not of one architecture fail the series.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, delete, select

from catalog import ANALYSES
from catalog.analyses.compare_curvature import COMPARE_CURVATURE
from catalog.requests.job import JobDocument
from jobs.codec import document_json, parse_document, sha256_of
from jobs.lifecycle import TERMINAL
from jobs.metrics.counters import add
from jobs.queue.children import cancel_pieces, child_name, insert_children, move_again
from jobs.queue.fence import change
from jobs.repository.lineage import unnamed
from jobs.schema.tables import artifacts, jobs, layer_results

CHECKPOINT, OVERLAP = "checkpoint", "overlap"
"""The parts of a series: a checkpoint, and a comparison of two neighbours."""
_L = layer_results.c


def start_series(connection: Connection, parent: Row[Any], documents: Sequence[JobDocument]) -> None:
    """Insert the jobs of the checkpoints of a series that is locked."""
    named = [(f"checkpoint {place} of {len(documents)}", each) for place, each in enumerate(documents, start=1)]
    children = [_child(parent, place, each, title, CHECKPOINT) for place, (title, each) in enumerate(named)]
    insert_children(connection, parent, children)


def series_place(key: str) -> tuple[str, int]:
    """Return which part of a series a job is, and its place, by its idempotency key; no caller's has blanks."""
    _, _, part, place = key.split(" ")
    return part, int(place)


def go_on(connection: Connection, parent: Row[Any], ended: Row[Any] | None = None) -> None:
    """Do to a locked series what follows from the end of one of its jobs, or from what has become of all."""
    columns = (jobs.c.id, jobs.c.idempotency_key, jobs.c.state, jobs.c.failure)
    rows = connection.execute(select(*columns).where(jobs.c.parent_id == parent.id)).all()
    places = {row.id: series_place(row.idempotency_key) for row in rows}
    checkpoints: dict[int, Any] = {places[row.id][1]: row for row in rows if places[row.id][0] == CHECKPOINT}
    good = [place for place in sorted(checkpoints) if checkpoints[place].state == "succeeded"]
    done = sum(row.state in TERMINAL for row in rows)
    if parent.state == "cancelling":
        if done == len(rows):
            drop_factors(connection, parent.id)
            move_again(connection, parent, "cancelled", {}, None)
        return
    part, own = (None, -1) if ended is None else places[ended.id]
    if part == CHECKPOINT and own in good and len(good) > 1:
        one, two = sorted((own, next(each for each in good if each != own)))
        failure = _other_architecture(connection, parent, (one, two), (checkpoints[one].id, checkpoints[two].id))
        if failure is not None:
            cancel_pieces(connection, parent.id, reason="the checkpoints are of different architectures")
            drop_factors(connection, parent.id)
            _fail(connection, parent, failure)
            return
    compares = parent.document["series"]["overlaps"]
    total = 2 * len(checkpoints) - 1 if compares else len(checkpoints)
    progress = {"stage": "series", "done": done, "total": total, "unit": "jobs", "updated_at": parent.now.isoformat()}
    change(connection, parent, {"progress": progress | {"percent": round(100 * done / total, 1)}})
    if done == len(rows) == len(checkpoints) and compares and _compare(connection, parent, checkpoints, good):
        return
    if done == len(rows):
        _end(connection, parent, checkpoints, succeeded=bool(good))


def _compare(connection: Connection, parent: Row[Any], checkpoints: Mapping[int, Any], good: list[int]) -> bool:
    """Insert the comparisons of neighbours that have both succeeded; return whether there are any."""
    kind, children = COMPARE_CURVATURE.kind, []
    for place in (each for each in good if each - 1 in good):
        options = {**parent.document[kind], "against": {"job": checkpoints[place - 1].id}}
        asked = {"kind": kind, "factors": {"job": checkpoints[place].id}, kind: options}
        # one process compares, and has no model to shard
        kept = {"memory": {**parent.document["memory"], "model_sharding": "off"}}
        kept["stabilisation"] = parent.document["stabilisation"]
        document = parse_document(json.dumps({**asked, **kept}).encode())
        free = dict.fromkeys(("needs_bytes", "model_factory", "data_factory"))
        child = _child(parent, place, document, f"checkpoints {place} and {place + 1}", OVERLAP)
        children.append({**child, **free, "kind": kind, "world_size": 1})
    if children:
        insert_children(connection, parent, children)
    return bool(children)


def _child(parent: Row[Any], place: int, document: JobDocument, title: str, part: str) -> dict[str, Any]:
    body = document_json(document)
    key = f"series {parent.id} {part} {place}"
    named = {"idempotency_key": key, "name": child_name(parent.name, title)}
    return {"document": body, "document_sha256": sha256_of(body), **named}


def drop_factors(connection: Connection, series_id: str) -> None:
    """Delete the rows of factors of a series' ended jobs that were only kept to be compared, and no open job names."""
    parent = connection.execute(select(jobs.c.kind, jobs.c.document).where(jobs.c.id == series_id)).one_or_none()
    if parent is None or parent.document.get("series") is None or "factors" in parent.document["keep"]:
        return
    if not any(ANALYSES[each].keeps_factors for each in parent.kind.split(",")):
        ended = select(jobs.c.id).where(jobs.c.parent_id == series_id, jobs.c.state.in_(TERMINAL), *unnamed())
        of_children = artifacts.c.job_id.in_(ended)
        connection.execute(delete(artifacts).where(of_children, artifacts.c.name.startswith("factors/")))


def _end(connection: Connection, parent: Row[Any], checkpoints: Mapping[int, Any], *, succeeded: bool) -> None:
    drop_factors(connection, parent.id)
    if succeeded:
        move_again(connection, parent, "succeeded", {}, None)
        return
    failure = checkpoints[0].failure or {}
    message = f"no checkpoint could be measured; the first (job {checkpoints[0].id}): {failure.get('message', '')}"
    _fail(connection, parent, {**failure, "message": message})


def _fail(connection: Connection, parent: Row[Any], failure: Mapping[str, Any]) -> None:
    move_again(connection, parent, "failed", {"failure": dict(failure)}, str(failure.get("code", "")))
    add(connection, "job_failures", str(failure.get("category", "fatal")))


def _other_architecture(
    connection: Connection, parent: Row[Any], places: tuple[int, int], job_ids: tuple[str, str]
) -> dict[str, Any] | None:
    """Return the failure by the first difference of the layers of two jobs; None where there is none."""
    layers = [_layers(connection, each) for each in job_ids]
    for name in dict.fromkeys((*layers[0], *layers[1])):
        facts = [each.get(name) for each in layers]
        known = [] if None in facts else [pair for pair in zip(*facts, strict=True) if None not in pair]
        if None not in facts and all(one == two for one, two in known):
            continue
        said = ["none" if each is None else "{}, {} × {}, {} parameters".format(*each) for each in facts]
        models = [f"checkpoint {place + 1} ({parent.document['series']['model'][place]})" for place in places]
        message = f"{models[1]} is of another architecture than {models[0]}: its layer `{name}` is {said[1]}, and that "
        return {
            "category": "usage",
            "code": "different_architectures",
            "message": f"{message}of the other {said[0]}; give checkpoints of one model",
            "pointer": f"/series/model/{places[1]}",
            "layer": name,
        }
    return None


def _layers(connection: Connection, job_id: str) -> dict[str, tuple[Any, ...]]:
    """Return class, columns, rows and parameters of each layer by its name, in the model's order."""
    sides = [_L.outcome["record", side].as_integer() for side in ("in_dim", "out_dim")]
    facts = (_L.outcome["module"].as_string(), *sides, _L.outcome["parameter_count"].as_integer())
    query = select(_L.layer, *facts).where(_L.job_id == job_id).order_by(_L.ordinal, _L.kind)
    return {layer: tuple(each) for layer, *each in connection.execute(query)}
