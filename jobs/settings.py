"""The settings of the ledger, and those that the API and the workers share."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import override

from catalog.record import FieldError
from catalog.requests.inputs import require_factory
from jobs.environment import CommaList, EnvironmentSettings, Folder, Seconds, Variables
from jobs.errors import SettingsInvalid
from jobs.records import LOCAL_TENANT
from jobs.s3_settings import S3Settings
from jobs.schema.identifiers import is_id

_S3 = "s3://"
_KEY_CHARACTERS = 32


class LedgerSettings(EnvironmentSettings):
    """The ledger's settings. Seconds are seconds of the database's clock."""

    database_url: Annotated[str, Variables(("KRONOSCOPE_DATABASE_URL", "DATABASE_URL"))] = Field(repr=False)
    """The ledger's database. Connecting may take three seconds, or more with `?connect_timeout=10` in the URL."""
    artifact_root: Annotated[Folder, Variables(("KRONOSCOPE_ARTIFACTS",))] = Folder(".kronoscope/artifacts")
    """Folder of the artifacts (in the images `/data/artifacts`), shared by API and workers; or `s3://bucket/prefix`."""
    staging: Folder = Folder(".kronoscope/staging")
    """With a bucket: the local folder that jobs write into first."""
    bucket: Annotated[S3Settings | None, Variables()] = None
    """The bucket that keeps the artifacts in place of the folder."""
    heartbeat_seconds: Seconds = 10
    """Seconds between renewals of leases and of offered devices."""
    lease_seconds: Seconds = 45
    """How long a silent worker keeps its job; at least two heartbeats."""
    reaper_seconds: Seconds = 10
    """Seconds between two searches of every API and worker for jobs with an expired lease or deadline."""
    sweep_seconds: Seconds = 600
    """Seconds between two searches of a worker for unreferenced files."""
    grace_seconds: Seconds = 3600
    """Age at which such files are removed."""
    running_jobs: int = Field(64, ge=0, le=1_000_000)
    """Running jobs of each tenant, plus one estimate; others wait without delaying other tenants. 0: no limit. Below
    the number of slots no tenant can hold all of them."""
    stored_bytes: int | None = Field(None, ge=1)
    """Bytes of each tenant's files, unless `kronoscope tenants set` says otherwise; no limit by default."""
    retention_days: float | None = Field(None, ge=0, le=36_500)
    """Days until an ended job is archived; by default never."""
    retention_files: Literal["keep", "drop"] = "keep"
    """`keep` or `drop` the files of an archived job."""
    cache_bytes: int = Field(20 * 2**30, ge=0)
    """Bytes of each tenant's cached factors; 0 keeps none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse a lease that would take running jobs away."""
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise SettingsInvalid(
                f"KRONOSCOPE_LEASE_SECONDS is {self.lease_seconds:g} and KRONOSCOPE_HEARTBEAT_SECONDS "
                f"{self.heartbeat_seconds:g}; a lease must outlive a missed heartbeat: make it at least twice as long"
            )
        return self

    @override
    @classmethod
    def read_values(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        # read the ledger's settings, and the bucket's where the artifacts are kept in one
        values = super().read_values(environ)
        if "database_url" not in values:
            raise SettingsInvalid(
                "no database is named; set KRONOSCOPE_DATABASE_URL (or KRONOSCOPE_DATABASE_URL_FILE), "
                "for instance to postgresql://user:password@host/kronoscope or sqlite:////absolute/path/ledger.db"
            )
        address = values.get("artifact_root", "")
        if address.startswith(_S3):
            bucket, _, prefix = address.removeprefix(_S3).partition("/")
            prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
            values["bucket"] = S3Settings.from_environment(environ, bucket=bucket, prefix=prefix)
            values["artifact_root"] = values.get("staging", cls.model_fields["staging"].default)
        elif "://" in address:
            raise SettingsInvalid(
                "KRONOSCOPE_ARTIFACTS is an address of no known kind; give a folder, or s3://bucket/prefix"
            )
        return values


class RoleSettings(EnvironmentSettings):
    """The passwords of the database's roles, which a migration makes where all three are set."""

    migrate_password: str | None = Field(None, repr=False)
    """Password of the role `kronoscope_migrate`, which the migration creates and uses."""
    api_password: str | None = Field(None, repr=False)
    """Password of the role `kronoscope_api`."""
    worker_password: str | None = Field(None, repr=False)
    """Password of the role `kronoscope_worker`."""
    webhooks_password: str | None = Field(None, repr=False)
    """Password of the role `kronoscope_webhooks`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse a part of the roles: what stands beside it would log in with rights that it should not have."""
        names = [f"KRONOSCOPE_{name.upper()}" for name, value in self if value is None]
        if names and len(names) < len(type(self).model_fields):
            raise SettingsInvalid(
                f"the passwords of the database's roles belong together: set {' and '.join(names)} too, or none to use "
                "one role for everything"
            )
        return self


def _long(keys: str | None) -> str | None:
    if keys is not None and min(map(len, keys.split(","))) < _KEY_CHARACTERS:
        raise ValueError(f"has a key of less than {_KEY_CHARACTERS} characters; take `openssl rand -hex 24`")
    return keys


WebhookKey = Annotated[str | None, AfterValidator(_long)]


class WebhookSettings(EnvironmentSettings):
    """The settings of the process that sends webhooks."""

    webhook_key: WebhookKey = Field(None, repr=False)
    """The same as the API's."""
    webhook_hosts: CommaList = ()
    """Comma list of host names, addresses and networks that webhooks may reach though they are not public."""
    pulse_file: Annotated[Path | None, Variables(("KRONOSCOPE_PULSE",))] = None
    """File that the sender touches every second."""


def _owner(entry: str) -> tuple[str | None, str]:
    """The tenant that an entry is for, and its value; None is everybody."""
    owner, equals, value = entry.partition("=")
    # a folder may have a `=` in its name
    return (owner, value) if equals and (owner == LOCAL_TENANT or is_id(owner)) else (None, entry)


def _require_callables(entries: tuple[str, ...]) -> tuple[str, ...]:
    for entry in entries:
        _, name = _owner(entry)
        if name == "*":
            continue
        try:
            require_factory("factory", name)
        except FieldError as error:
            raise SettingsInvalid(
                f"KRONOSCOPE_ALLOW_FACTORIES has {name[:80]!r}; list each as `package.module:callable`, or `*` for all"
            ) from error
    return entries


class ServiceSettings(EnvironmentSettings):
    """The settings that the API and the workers of one service both read."""

    ledger: Annotated[LedgerSettings, Variables()]
    redis_url: Annotated[str | None, Variables(("KRONOSCOPE_REDIS_URL", "REDIS_URL"))] = Field(None, repr=False)
    """Carries the wake-ups. Without it the API sends none, and workers poll; `kronoscope worker` then tries
    `redis://127.0.0.1:6379/0`."""
    allowed_factories: Annotated[
        CommaList,
        AfterValidator(_require_callables),
        Variables(("KRONOSCOPE_ALLOW_FACTORIES",)),
    ] = ()
    """Comma list of `package.module:callable` that jobs may name; `*` allows all. `TENANT_ID=package.module:callable`
    is for that tenant only. Jobs go to workers that list their factory."""
    allowed_directories: Annotated[CommaList, Variables(("KRONOSCOPE_ALLOW_DIRECTORIES",))] = ()
    """Comma list of folders that jobs may read; `*` allows all. `TENANT_ID=/folder` is for that tenant only. Links are
    followed within a listed folder."""
    model_store: Folder = Folder(".kronoscope/models")
    """Folder of builtin and hub models and of the machine's measured speed (in the images `/data/models`)."""
    disk_floor_bytes: int = Field(256 * 2**20, ge=0)
    """Below this free space workers take no job, and `/readyz` fails (not with a bucket)."""

    def factories_of(self, tenant_id: str) -> tuple[str, ...]:
        """Return the factories that a tenant's jobs may name: those for everybody and for this tenant, `*` for all."""
        return _allowed(self.allowed_factories, tenant_id)

    def directories_of(self, tenant_id: str) -> tuple[str, ...]:
        """Return the folders that a tenant's jobs may read: those for everybody and for this tenant, `*` for all."""
        return _allowed(self.allowed_directories, tenant_id)

    def factories_of_any(self) -> tuple[str, ...]:
        """Return the factories that jobs of at least one tenant may name."""
        return tuple(dict.fromkeys(value for _, value in map(_owner, self.allowed_factories)))

    @override
    @classmethod
    def read_values(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        return {"ledger": LedgerSettings.from_environment(environ), **super().read_values(environ)}


def _allowed(entries: Iterable[str], tenant_id: str) -> tuple[str, ...]:
    return tuple(value for owner, value in map(_owner, entries) if owner in (None, tenant_id))
