"""What the database itself saw of every write: triggers of the test's own, beside the ledger and out of its reach.

The ledger's rows say how things stand; these say how they came to stand so: which state followed
which, and under which epoch of its job each row was written, whatever became of it afterwards.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, text

_SCHEMA = """
CREATE TABLE chaos_moves (
    id bigserial PRIMARY KEY, job_id text NOT NULL, old_state text, new_state text,
    old_fence bigint, new_fence bigint, attempt integer, manifest_fence bigint,
    transaction bigint NOT NULL DEFAULT txid_current()
);
CREATE TABLE chaos_writes (
    id bigserial PRIMARY KEY, place text NOT NULL, operation text NOT NULL, job_id text NOT NULL, name text NOT NULL,
    fence bigint, job_fence bigint, job_state text, sha256 text
);
CREATE TABLE chaos_leases (
    id bigserial PRIMARY KEY, job_id text NOT NULL, fence bigint NOT NULL, device text NOT NULL, kind text,
    transaction bigint NOT NULL DEFAULT txid_current()
);
CREATE FUNCTION chaos_leased() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_leases (job_id, fence, device, kind)
    SELECT NEW.job_id, NEW.fence, NEW.device_uuid, devices.kind FROM devices WHERE devices.uuid = NEW.device_uuid;
    RETURN NULL;
END $$;
CREATE FUNCTION chaos_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO chaos_moves (job_id, new_state, new_fence, attempt)
        VALUES (NEW.id, NEW.state, NEW.fence, NEW.attempt);
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO chaos_moves (job_id, old_state, old_fence) VALUES (OLD.id, OLD.state, OLD.fence);
    ELSIF (OLD.state, OLD.fence) IS DISTINCT FROM (NEW.state, NEW.fence)
        OR OLD.manifest::text IS DISTINCT FROM NEW.manifest::text THEN
        INSERT INTO chaos_moves (job_id, old_state, new_state, old_fence, new_fence, attempt, manifest_fence)
        VALUES (NEW.id, OLD.state, NEW.state, OLD.fence, NEW.fence, NEW.attempt,
            CASE WHEN OLD.manifest::text IS DISTINCT FROM NEW.manifest::text
                THEN (NEW.manifest::json ->> 'fence')::bigint END);
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION chaos_wrote() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    entry jsonb;
BEGIN
    IF TG_OP = 'DELETE' THEN entry := to_jsonb(OLD); ELSE entry := to_jsonb(NEW); END IF;
    INSERT INTO chaos_writes (place, operation, job_id, name, fence, job_fence, job_state, sha256)
    SELECT TG_TABLE_NAME, TG_OP, entry ->> 'job_id',
        coalesce(entry ->> 'name', (entry ->> 'kind') || ' ' || (entry ->> 'ordinal'), entry ->> 'seq'),
        (entry ->> 'fence')::bigint, jobs.fence, jobs.state, entry ->> 'sha256'
    FROM (SELECT 1) AS one LEFT JOIN jobs ON jobs.id = entry ->> 'job_id';
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_moved AFTER INSERT OR UPDATE OR DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION chaos_moved();
CREATE TRIGGER chaos_wrote_layers AFTER INSERT OR UPDATE OR DELETE ON layer_results
    FOR EACH ROW EXECUTE FUNCTION chaos_wrote();
CREATE TRIGGER chaos_wrote_artifacts AFTER INSERT OR UPDATE OR DELETE ON artifacts
    FOR EACH ROW EXECUTE FUNCTION chaos_wrote();
CREATE TRIGGER chaos_wrote_history AFTER UPDATE OR DELETE ON job_events FOR EACH ROW EXECUTE FUNCTION chaos_wrote();
CREATE TRIGGER chaos_leased AFTER INSERT ON device_leases FOR EACH ROW EXECUTE FUNCTION chaos_leased();
"""


@dataclass(frozen=True)
class Move:
    """A change of a job's state or epoch, in the order of commits to its row; None for what there is not."""

    job_id: str
    old_state: str | None
    new_state: str | None
    old_fence: int | None
    new_fence: int | None
    attempt: int | None
    manifest_fence: int | None
    """The epoch that a new manifest says it was written under."""
    transaction: int = 0
    """The number of the transaction, so that what was done together can be told from what came after."""


@dataclass(frozen=True)
class Write:
    """A row of results written, changed or removed, and its job as it stood in that transaction."""

    place: str
    operation: str
    job_id: str
    name: str
    fence: int | None
    job_fence: int | None
    job_state: str | None
    sha256: str | None = None
    """The digest that the row names."""


@dataclass(frozen=True)
class Leased:
    """A device leased for an attempt."""

    job_id: str
    fence: int
    device: str
    kind: str | None
    """`host`, `cpu` or `cuda`; a host is leased once, however many ranks share it."""
    transaction: int


def install(engine: Engine) -> None:
    """Begin to keep records; before the first job."""
    with engine.begin() as connection:
        connection.exec_driver_sql(_SCHEMA)


def moves(engine: Engine) -> list[Move]:
    """Every change so far."""
    return [Move(**row) for row in _records(engine, "chaos_moves")]


def writes(engine: Engine) -> list[Write]:
    """Every write so far."""
    return [Write(**row) for row in _records(engine, "chaos_writes")]


def leases(engine: Engine) -> list[Leased]:
    """Every lease of a device so far."""
    return [Leased(**row) for row in _records(engine, "chaos_leases")]


def _records(engine: Engine, table: str) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        rows = connection.execute(text(f"SELECT * FROM {table} ORDER BY id")).mappings()
        return [{name: value for name, value in row.items() if name != "id"} for row in rows]
