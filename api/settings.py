"""The settings of the API."""

import ipaddress
import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from jobs.environment import CommaList, Flag, Variables
from jobs.errors import SettingsInvalid
from jobs.settings import ServiceSettings
from jobs.tenancy.api_keys import check_secret

_TOKEN = re.compile(r"[\x21-\x7e]{16,256}")


class Settings(ServiceSettings):
    """The API's settings; the ledger's are a part of them."""

    embedded: Flag = False
    """1: one tenant and no keys, on a loopback address only; `kronoscope serve --embedded` sets it."""
    host: str = "127.0.0.1"
    """Address at which the API listens (in the image `0.0.0.0`)."""
    port: int = Field(8000, ge=1, le=65_535)
    """Port at which the API listens; in `.env` it is the published one."""
    key_secret: str | None = Field(None, repr=False)
    """HMAC key of the API keys, 16 characters or more; another value ends every key."""
    metrics_token: str | None = Field(None, repr=False)
    """Token that Prometheus shows at `/metrics` (`Authorization: Bearer …`), 16 to 256 characters; without it nobody
    reads them, but in embedded mode."""
    metrics_seconds: float = Field(5, ge=0, le=60)
    """How long one count of the ledger serves every scrape."""
    connections: int = Field(1000, ge=1, le=100_000)
    """Connections open at a time. Beyond them the one that waits longest for its client gives way to a new one. The
    process needs so many open files and 640 more, and refuses to start where it cannot have them."""
    connections_per_client: int = Field(100, ge=1, le=100_000)
    """The same of each client address (of an IPv6 network of 64 bits), and requests at a time of each that a trusted
    proxy names; beyond them 429 where all are being answered."""
    trusted_proxies: Annotated[CommaList, Variables(("KRONOSCOPE_TRUSTED_PROXIES",), shown="empty")] = ()
    """Comma list of addresses and networks of reverse proxies that write `X-Forwarded-For` themselves, `gateway` for
    that of the default route. They are no client: the last address of the header that is not listed is. Nobody else's
    header is read."""
    header_seconds: float = Field(10, ge=0.05, le=3600)
    """How long a client may take for the header of a request before its connection is closed."""
    idle_seconds: int = Field(10, ge=1, le=3600)
    """How long a connection stays open between two requests."""
    body_limit_bytes: Annotated[int, Variables()] = 256 * 1024
    body_seconds: float = Field(10, ge=0)
    """How long the body of a request may take to arrive before it is answered 408."""
    database_seconds: float = Field(8, ge=0.1, le=600)
    """How long the database may take for all queries of a request together before it is answered 503."""
    estimate_seconds: float = Field(10, ge=0)
    """How long `POST /v1/estimates` waits before it answers 202; 0 answers at once."""
    signed_seconds: int = Field(300, ge=0, le=604_800)
    """How long the signed address of a file in a bucket is good for; 0 sends files through the API."""
    streams: int = Field(200, ge=0)
    """Streams of events open at a time, counted by each API process, and no more than half of its connections; beyond
    them 503."""
    streams_per_key: int = Field(3, ge=0)
    """Streams of events open at a time for each key, counted by each API process; beyond them 429."""
    stream_seconds: float = Field(600, ge=0.05, le=86_400)
    """How long one stream lasts before its reader has to connect again."""
    stream_write_seconds: float = Field(10, ge=0.05, le=86_400)
    """How long a reader of any answer may take nothing before its connection is cut."""
    stream_idle_seconds: float = Field(15, ge=0.05, le=86_400)
    """Seconds between two signs of life in a stream without events; less than any proxy's read timeout."""
    long_polls: int = Field(200, ge=0)
    """Requests with `wait` that wait at a time, in each API process, and no more than a quarter of its connections;
    beyond them they are answered at once."""
    long_polls_per_key: int = Field(50, ge=1, le=100_000)
    """Requests of each key that wait at a time, in each API process; beyond them 429."""
    requests_per_second: float = Field(100, ge=0, le=100_000)
    """Requests of each key a second, and twice as many at once, in each API process; beyond them 429. 0 sets no
    limit."""
    requests_per_key: int = Field(2, ge=1, le=10_000)
    """Requests of each key that are worked on at a time, in each API process. 32 times as many wait for them,
    without a thread or a connection to the database; beyond them 429."""
    refused_per_minute: int = Field(60, ge=0, le=1_000_000)
    """Requests of each client address without a valid key that are answered 401 in a minute, in each API process;
    beyond them 429. A valid key of the same address is served all the same. 0 sets no limit."""
    queued_jobs: int = Field(1000, ge=1, le=1_000_000)
    """Jobs and estimates of each tenant that may wait; beyond them 429."""
    queued_bytes: int = Field(64 * 2**20, ge=1)
    """Text of their documents; beyond it 429."""

    @model_validator(mode="after")
    def _check(self) -> Self:
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
        return self

    @property
    def streams_at_most(self) -> int:
        """The cap on streams, which leaves connections for other requests also where all come from one address."""
        return min(self.streams, self.connections // 2)

    @property
    def long_polls_at_most(self) -> int:
        """The same of requests that wait."""
        return min(self.long_polls, self.connections // 4)


def is_loopback(host: str) -> bool:
    """Return whether an address reaches this machine alone.

    Args:
        host: A name or an IP address, in brackets or not.

    Returns:
        True for ``localhost`` and the loopback addresses; False for every other name, resolved or not.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
