"""Shared workers: which workers take jobs once the ledger knows a second tenant.

::

    one tenant                             every worker
    several, with walls between the jobs   every worker where the walls hold
    several, without walls                 a worker that its operator has allowed it, by name; no other

The tenant `local`, which every ledger has, counts from its first job on. The rule is asked in the transaction of a
claim: a tenant stands in the ledger before its first job does, so no worker claims one that it must leave.
"""

from collections.abc import Collection

from sqlalchemy import Connection, Engine, or_, select

from jobs.errors import SettingsInvalid
from jobs.records import LOCAL_TENANT
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading
from jobs.schema.tables import jobs, tenants, workers

BETWEEN_TENANTS = ("files", "neighbours", "memory")
"""The walls without which a job could read or change what another tenant's has."""
ALLOWED_WITHOUT = "shared_without_walls"
"""The entry beside a worker's walls where its operator allows several tenants without them."""
REMEDY = (
    "give jobs users of their own (KRONOSCOPE_CHILD_USER, as Compose does) or, where a host allows them, namespaces of"
    " their own (KRONOSCOPE_CHILD_NAMESPACES=1), or each tenant a service of its own, or allow it with"
    " KRONOSCOPE_SHARED_WITHOUT_WALLS=1"
)

_HAS_JOBS = select(jobs.c.id).where(jobs.c.tenant_id == LOCAL_TENANT).exists()
_SECOND = (
    select(tenants.c.id)
    .where(or_(tenants.c.id != LOCAL_TENANT, tenants.c.served_at.is_not(None), _HAS_JOBS))
    .offset(1)
    .limit(1)
)
_ISOLATION = select(workers.c.isolation).where(workers.c.expires_at > ledger_now())


def keeps_tenants_apart(isolation: Collection[str]) -> bool:
    """Return whether a worker may take jobs of several tenants.

    The walls that hold there, and `ALLOWED_WITHOUT` where its operator asks for none, decide.
    """
    return ALLOWED_WITHOUT in isolation or not missing_walls(isolation)


def missing_walls(isolation: Collection[str]) -> tuple[str, ...]:
    """Return the walls between tenants that are not among those that hold on a worker."""
    return tuple(each for each in BETWEEN_TENANTS if each not in isolation)


def has_second_tenant(engine: Engine) -> bool:
    """Return whether the ledger knows more than one tenant."""
    with reading(engine) as connection:
        return second_tenant(connection)


def require_walls(engine: Engine, isolation: Collection[str]) -> None:
    """Refuse to start a worker that could take no job.

    ``SettingsInvalid`` if there are several tenants whom it does not keep apart, by its walls and `ALLOWED_WITHOUT`.
    """
    if not keeps_tenants_apart(isolation) and has_second_tenant(engine):
        raise SettingsInvalid(
            "the ledger has several tenants, and not every wall between their jobs holds here"
            f" ({', '.join(missing_walls(isolation))} missing); {REMEDY}"
        )


def second_tenant(connection: Connection) -> bool:
    """Return whether the ledger knows more than one tenant."""
    return connection.execute(_SECOND).scalar_one_or_none() is not None


def may_take(connection: Connection, worker_id: str) -> bool:
    """Return whether a worker may take a job of any tenant; one that is not registered may not."""
    found = connection.execute(select(workers.c.isolation).where(workers.c.id == worker_id)).one_or_none()
    return found is not None and (keeps_tenants_apart(found.isolation or ()) or not second_tenant(connection))


def waits_for_walls(connection: Connection) -> bool:
    """Return whether there are workers, and none of them may take a job since there are several tenants."""
    isolation = [each or () for each in connection.execute(_ISOLATION).scalars()]
    return bool(isolation) and not any(map(keeps_tenants_apart, isolation)) and second_tenant(connection)


def sharing_of_workers(engine: Engine) -> str:
    """Return a sentence about what the workers do with jobs of several tenants."""
    with reading(engine) as connection:
        isolation = [each or () for each in connection.execute(_ISOLATION).scalars()]
        several = second_tenant(connection)
    if not several:
        return "one tenant"
    refusing = [each for each in isolation if not keeps_tenants_apart(each)]
    if refusing:
        missing = sorted({wall for each in refusing for wall in missing_walls(each)})
        return (
            f"{len(refusing)} of {len(isolation)} workers take no job: there are several tenants, and not every wall"
            f" between them holds ({', '.join(missing)}); {REMEDY}"
        )
    if any(missing_walls(each) for each in isolation):
        return "several tenants, without walls between them, as KRONOSCOPE_SHARED_WITHOUT_WALLS allows"
    return "several tenants, with walls between them" if isolation else "several tenants, and no worker is known"
