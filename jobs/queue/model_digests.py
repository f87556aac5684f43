"""Model digests: which weights a tenant's jobs have seen of each model of the store, noted at the first of them.

Every job computes the digest of the model that it measures. A model of the store that was exchanged, or fetched anew,
shows in the next job that measures it. The digest is the job's own claim, so it is held against those of its own tenant
alone: no tenant can make another's model look exchanged.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from jobs.codec import sha256_of
from jobs.records import Claim
from jobs.schema.clock import ledger_now
from jobs.schema.tables import model_digests

_STORED = ("builtin", "huggingface")
"""Sources whose models lie in the store of all."""
_C = model_digests.c


def note_model(connection: Connection, claim: Claim, model_sha256: str | None) -> str | None:
    """Note the digest of a job's model, and hold it against the one that was noted before."""
    source = _source(claim.document)
    if source is None or model_sha256 is None:
        return None
    noted = select(_C.model_sha256, _C.job_id).where(_C.tenant_id == claim.tenant_id, _C.source_sha256 == source)
    before = connection.execute(noted).one_or_none()
    if before is not None and before.model_sha256 == model_sha256:
        return None
    seen = {"model_sha256": model_sha256, "job_id": claim.job_id, "seen_at": ledger_now()}
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    added = dialect.insert(model_digests).values(tenant_id=claim.tenant_id, source_sha256=source, **seen)
    connection.execute(added.on_conflict_do_update(index_elements=[_C.tenant_id, _C.source_sha256], set_=seen))
    if before is None:
        return None
    return (
        f"the model is another one than job {before.job_id} has measured under the same name: its digest was "
        f"{before.model_sha256}, and is {model_sha256}. It was fetched or trained anew since, or exchanged in the store"
    )


def _source(document: Mapping[str, Any]) -> str | None:
    """The digest of all in a document that says which weights are loaded, and how; None of a model from elsewhere."""
    model = document.get("model") or {}
    if model.get("source") not in _STORED:
        return None
    collection = document.get("collection") or {}
    return sha256_of({"model": dict(model), "task": document.get("task"), "dtype": collection.get("dtype")})
