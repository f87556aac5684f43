"""Where the ledger lives and how patient it is: read once from the environment, at the process's edge."""

import math
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from catalog.duration import duration_seconds
from catalog.record import record
from jobs.errors import SettingsInvalid
from jobs.s3_settings import S3Settings

_S3 = "s3://"
_MAX_SECRET_BYTES = 65_536
_MAX_DAYS = 36_500


@record
class LedgerSettings:
    """The operator's choice. Seconds are seconds of the database's clock."""

    database_url: str = field(repr=False)  # holds a password
    artifact_root: Path
    """The folder of the artifacts; with a bucket, where what becomes one is written first."""
    bucket: S3Settings | None = None
    """Where artifacts are kept in place of the folder."""
    heartbeat_seconds: float = 10
    """Between two renewals of a lease."""
    lease_seconds: float = 45
    """A job whose owner is silent for this long is taken away."""
    reaper_seconds: float = 10
    """Between two looks for expired leases."""
    relay_seconds: float = 5
    """Between two rounds of the relay, which sends wake-ups."""
    unclaimed_seconds: float = 15
    """A wake-up is sent again if nobody claims its job for this long."""
    sweep_seconds: float = 600
    """Between two looks for objects and staged files that nothing names."""
    grace_seconds: float = 3600
    """How old they must be to be removed."""
    retention_days: float | None = None
    """An ended job's rows, events and files are archived after so many; null keeps them in the ledger."""
    retention_files: Literal["keep", "drop"] = "keep"
    """What becomes of an archived job's files."""
    cache_bytes: int = 20 * 2**30
    """What the cached factors of one tenant may take below the artifacts; 0 keeps none."""

    def __post_init__(self) -> None:
        """Refuse times that would take running jobs away."""
        for name in (
            *("heartbeat_seconds", "lease_seconds", "reaper_seconds", "relay_seconds", "unclaimed_seconds"),
            *("sweep_seconds", "grace_seconds"),
        ):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise SettingsInvalid(f"{name} is {value}; take a positive number of seconds")
        if self.cache_bytes < 0:
            raise SettingsInvalid(f"KRONOSCOPE_CACHE_BYTES is {self.cache_bytes}; take 0 (no cache) or more bytes")
        if self.retention_days is not None and not 0 <= self.retention_days <= _MAX_DAYS:
            raise SettingsInvalid(
                f"KRONOSCOPE_RETENTION_DAYS is {self.retention_days:g}; take 0 to {_MAX_DAYS:,} days, or leave it out"
            )
        if self.retention_files not in ("keep", "drop"):
            raise SettingsInvalid("KRONOSCOPE_RETENTION_FILES is neither keep nor drop; take one of them")
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise SettingsInvalid(
                f"lease_seconds is {self.lease_seconds:g} and heartbeat_seconds {self.heartbeat_seconds:g}; "
                "a lease must outlive a missed heartbeat: make KRONOSCOPE_LEASE_SECONDS at least "
                "twice KRONOSCOPE_HEARTBEAT_SECONDS"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "LedgerSettings":
        """Read the settings.

        Raises:
            SettingsInvalid: If the database is not named, or a number is none.
        """
        url = secret(environ, "KRONOSCOPE_DATABASE_URL") or secret(environ, "DATABASE_URL")
        if url is None:
            raise SettingsInvalid(
                "no database is named; set KRONOSCOPE_DATABASE_URL (or KRONOSCOPE_DATABASE_URL_FILE), "
                "for instance to postgresql://user:password@host/kronoscope or sqlite:////absolute/path/ledger.db"
            )
        return cls(
            database_url=url,
            artifact_root=_artifact_root(environ),
            bucket=_bucket(environ),
            heartbeat_seconds=seconds(environ, "KRONOSCOPE_HEARTBEAT_SECONDS", 10),
            lease_seconds=seconds(environ, "KRONOSCOPE_LEASE_SECONDS", 45),
            reaper_seconds=seconds(environ, "KRONOSCOPE_REAPER_SECONDS", 10),
            relay_seconds=seconds(environ, "KRONOSCOPE_RELAY_SECONDS", 5),
            unclaimed_seconds=seconds(environ, "KRONOSCOPE_UNCLAIMED_SECONDS", 15),
            sweep_seconds=seconds(environ, "KRONOSCOPE_SWEEP_SECONDS", 600),
            grace_seconds=seconds(environ, "KRONOSCOPE_GRACE_SECONDS", 3600),
            retention_days=_days(environ, "KRONOSCOPE_RETENTION_DAYS"),
            retention_files=environ.get("KRONOSCOPE_RETENTION_FILES") or "keep",  # type: ignore[arg-type]  # checked above
            cache_bytes=_bytes(environ, "KRONOSCOPE_CACHE_BYTES", cls.cache_bytes),
        )


def _artifact_root(environ: Mapping[str, str]) -> Path:
    named = environ.get("KRONOSCOPE_ARTIFACTS") or ".kronoscope/artifacts"
    if named.startswith(_S3):
        return Path(environ.get("KRONOSCOPE_STAGING") or ".kronoscope/staging").absolute()
    if "://" in named:
        raise SettingsInvalid(
            "KRONOSCOPE_ARTIFACTS is an address of no known kind; give a folder, or s3://bucket/prefix"
        )
    return Path(named).absolute()


def _bucket(environ: Mapping[str, str]) -> S3Settings | None:
    """The bucket that keeps the artifacts; None where a folder does."""
    named = environ.get("KRONOSCOPE_ARTIFACTS") or ""
    if not named.startswith(_S3):
        return None
    bucket, _, prefix = named.removeprefix(_S3).partition("/")
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    given = (environ.get(name) for name in ("KRONOSCOPE_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    endpoint = next((url for url in given if url), f"https://s3.{region}.amazonaws.com").rstrip("/")
    return S3Settings(
        bucket=bucket,
        prefix=f"{prefix.strip('/')}/" if prefix.strip("/") else "",
        region=region,
        endpoint=endpoint,
        public_endpoint=(environ.get("KRONOSCOPE_S3_PUBLIC_ENDPOINT") or endpoint).rstrip("/"),
        access_key_id=secret(environ, "AWS_ACCESS_KEY_ID"),
        secret_access_key=secret(environ, "AWS_SECRET_ACCESS_KEY"),
        session_token=secret(environ, "AWS_SESSION_TOKEN"),
    )


def seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """A duration from the environment.

    Raises:
        SettingsInvalid: If it is no number.
    """
    text = environ.get(name)
    if not text:
        return default
    try:
        return float(text)
    except ValueError as error:
        raise SettingsInvalid(f"{name} is no number; write seconds, such as {default:g}") from error


def _days(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise SettingsInvalid(f"{name} is no number; write days, such as 90, or leave it out") from error


def duration(environ: Mapping[str, str], name: str) -> float | None:
    """The seconds of a time written with its unit; None where it is not set.

    Raises:
        SettingsInvalid: If it is no duration.
    """
    text = environ.get(name)
    if not text:
        return None
    found = duration_seconds(text)
    if found is None:
        raise SettingsInvalid(f"{name} is no duration; write a number with its unit (s, m, h or d), such as 10m")
    return found


def _bytes(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise SettingsInvalid(f"{name} is no whole number; write bytes, such as {default}") from error


def secret(environ: Mapping[str, str], name: str) -> str | None:
    """A value given directly, or in the file that ``NAME_FILE`` points to (as containers hand secrets over).

    Raises:
        SettingsInvalid: If both are given, or the file cannot be read.
    """
    value, path = environ.get(name), environ.get(f"{name}_FILE")
    if value and path:
        raise SettingsInvalid(f"both {name} and {name}_FILE are set; keep one of them")
    if not path:
        return value or None
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MAX_SECRET_BYTES + 1)
        text = raw.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(
            f"{name}_FILE cannot be read ({type(error).__name__}); point it to a text file"
        ) from error
    if not text or len(raw) > _MAX_SECRET_BYTES:
        raise SettingsInvalid(f"{name}_FILE holds {len(raw):,} bytes; expected 1 to {_MAX_SECRET_BYTES:,}")
    return text
