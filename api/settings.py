"""What the operator decides about the service's front door: read once from the environment."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from catalog.record import record
from jobs.errors import SettingsInvalid
from jobs.settings import LedgerSettings, seconds, secret
from jobs.tenancy.api_keys import check_secret

_TOKEN = re.compile(r"[\x21-\x7e]{16,256}")


@record
class Settings:
    """The front door's settings, and the ledger's beneath them."""

    ledger: LedgerSettings
    embedded: bool = False
    """One tenant, no keys: only on a loopback address."""
    host: str = "127.0.0.1"
    port: int = 8000
    key_secret: str | None = field(default=None, repr=False)
    """Keys are stored as HMACs under it; needed unless embedded."""
    metrics_token: str | None = field(default=None, repr=False)
    """What Prometheus shows at `/metrics`; without it nobody reads them, but in embedded mode."""
    metrics_seconds: float = 5
    """How long one count of the ledger serves every scrape."""
    redis_url: str | None = field(default=None, repr=False)  # holds a password
    """The broker of the wake-ups; without it workers find jobs by polling."""
    allowed_factories: tuple[str, ...] = ()
    """Each `package.module:callable`, or `*`."""
    allowed_directories: tuple[str, ...] = ()
    """Folders whose contents jobs may name, or `*`."""
    model_store: Path = Path(".kronoscope/models")
    """Where a fetch step leaves hub models for offline reading."""
    body_limit_bytes: int = 256 * 1024
    body_seconds: float = 10
    """How long a request's body may take to arrive."""
    estimate_seconds: float = 10
    """How long `POST /v1/estimates` waits for the estimate before it answers where that will be."""
    signed_seconds: int = 300
    """How long the address that a bucket's file is fetched from is good for; 0 sends files through the API."""
    disk_floor_bytes: int = 256 * 2**20
    """Below this much free space for artifacts the service is not ready."""
    streams: int = 200
    """Streams of events at a time, in this process."""
    streams_per_key: int = 3
    """Of these one key may have so many; without keys, in embedded mode, the cap above is the only one."""
    stream_seconds: float = 600
    """How long one stream lasts; its reader connects again and goes on where it was."""
    stream_write_seconds: float = 10
    """How long a stream waits for a reader that takes nothing before it cuts the connection."""
    stream_idle_seconds: float = 15
    """Between two signs of life in a stream without events; proxies cut what is silent for a minute."""
    long_polls: int = 200
    """Requests that wait at a time, in this process; beyond them `wait` is answered at once."""

    def __post_init__(self) -> None:
        """Refuse a service that would be open to strangers, or that could verify no key."""
        if self.embedded and not is_loopback(self.host):
            raise SettingsInvalid(
                f"KRONOSCOPE_HOST is {self.host}, but embedded mode asks nobody for a key: bind it to 127.0.0.1, "
                "or unset KRONOSCOPE_EMBEDDED and create keys with `kronoscope keys create`"
            )
        if not self.embedded and not self.key_secret:
            raise SettingsInvalid(
                "KRONOSCOPE_KEY_SECRET (or KRONOSCOPE_KEY_SECRET_FILE) is missing: API keys are verified with it; "
                "set it to the value that `kronoscope keys create` uses"
            )
        if self.key_secret:
            check_secret(self.key_secret)
        if self.metrics_token is not None and not _TOKEN.fullmatch(self.metrics_token):
            raise SettingsInvalid(
                "KRONOSCOPE_METRICS_TOKEN cannot be sent in a header: take 16 to 256 visible ASCII characters, "
                "such as those of `openssl rand -hex 24`"
            )
        if not 0 <= self.metrics_seconds <= 60:
            raise SettingsInvalid(f"KRONOSCOPE_METRICS_SECONDS is {self.metrics_seconds:g}; take 0 to 60 seconds")
        if not 0 <= self.signed_seconds <= 604_800:
            raise SettingsInvalid(
                f"KRONOSCOPE_SIGNED_SECONDS is {self.signed_seconds}; take 0 (none) to 604800 seconds, a week"
            )
        _check_streams(self)
        if not 1 <= self.port <= 65_535:
            raise SettingsInvalid(f"KRONOSCOPE_PORT is {self.port}; take 1 to 65535")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Settings":
        """Read the settings.

        Raises:
            SettingsInvalid: If one is missing or means nothing.
        """
        return cls(
            ledger=LedgerSettings.from_environment(environ),
            embedded=_flag(environ, "KRONOSCOPE_EMBEDDED"),
            host=environ.get("KRONOSCOPE_HOST") or "127.0.0.1",
            port=_whole(environ, "KRONOSCOPE_PORT", 8000),
            key_secret=secret(environ, "KRONOSCOPE_KEY_SECRET"),
            metrics_token=secret(environ, "KRONOSCOPE_METRICS_TOKEN"),
            metrics_seconds=seconds(environ, "KRONOSCOPE_METRICS_SECONDS", 5),
            redis_url=secret(environ, "KRONOSCOPE_REDIS_URL") or secret(environ, "REDIS_URL"),
            allowed_factories=_listed(environ, "KRONOSCOPE_ALLOW_FACTORIES"),
            allowed_directories=_listed(environ, "KRONOSCOPE_ALLOW_DIRECTORIES"),
            model_store=Path(environ.get("KRONOSCOPE_MODEL_STORE") or ".kronoscope/models").absolute(),
            body_seconds=seconds(environ, "KRONOSCOPE_BODY_SECONDS", 10),
            estimate_seconds=seconds(environ, "KRONOSCOPE_ESTIMATE_SECONDS", 10),
            signed_seconds=_whole(environ, "KRONOSCOPE_SIGNED_SECONDS", 300),
            disk_floor_bytes=_whole(environ, "KRONOSCOPE_DISK_FLOOR_BYTES", 256 * 2**20),
            streams=_whole(environ, "KRONOSCOPE_STREAMS", 200),
            streams_per_key=_whole(environ, "KRONOSCOPE_STREAMS_PER_KEY", 3),
            stream_seconds=seconds(environ, "KRONOSCOPE_STREAM_SECONDS", 600),
            stream_write_seconds=seconds(environ, "KRONOSCOPE_STREAM_WRITE_SECONDS", 10),
            stream_idle_seconds=seconds(environ, "KRONOSCOPE_STREAM_IDLE_SECONDS", 15),
            long_polls=_whole(environ, "KRONOSCOPE_LONG_POLLS", 200),
        )


def _check_streams(settings: Settings) -> None:
    for name in ("streams", "streams_per_key", "long_polls"):
        if getattr(settings, name) < 0:
            raise SettingsInvalid(f"KRONOSCOPE_{name.upper()} is {getattr(settings, name)}; take 0 (none) or more")
    for name in ("stream_seconds", "stream_write_seconds", "stream_idle_seconds"):
        if not 0.05 <= getattr(settings, name) <= 86_400:
            raise SettingsInvalid(f"KRONOSCOPE_{name.upper()} is {getattr(settings, name)}; take 0.05 to 86400 seconds")


def is_loopback(host: str) -> bool:
    """Whether ``host`` reaches this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").lower()
    if value not in ("", "0", "1", "true", "false"):
        raise SettingsInvalid(f"{name} is neither 0 nor 1")
    return value in ("1", "true")


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise SettingsInvalid(f"{name} is no whole number; write one such as {default}") from error


def _listed(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in environ.get(name, "").split(",") if part.strip())
