"""The settings of the API."""

import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from catalog.public_address import is_loopback
from jobs.environment import CommaList, Flag, Variables
from jobs.errors import SettingsInvalid
from jobs.settings import ServiceSettings, WebhookKey
from jobs.tenancy.api_keys import check_secret

_TOKEN = re.compile(r"[\x21-\x7e]{16,256}")


class Settings(ServiceSettings):
    """The API's settings; the ledger's are a part of them."""

    embedded: Flag = False
    """1: one tenant and no keys, on a loopback address only; `kronoscope serve --embedded` sets it."""
    host: str = "127.0.0.1"
    """Listening address (in the image `0.0.0.0`)."""
    port: int = Field(8000, ge=1, le=65_535)
    """Listening port; in `.env` the published one."""
    key_secret: str | None = Field(None, repr=False)
    """HMAC key of the API keys, 16 characters or more; another value ends every key."""
    webhook_key: WebhookKey = Field(None, repr=False)
    """Encrypts the secrets of webhooks: 32 characters or more; a comma list, of which the first encrypts and each
    decrypts. Without it there are none."""
    metrics_token: str | None = Field(None, repr=False)
    """Token for `/metrics` (`Authorization: Bearer …`), 16 to 256 characters; without it they are readable in embedded
    mode only."""
    metrics_seconds: float = Field(5, ge=0, le=60)
    """How long one count of the ledger serves all scrapes."""
    connections: int = Field(1000, ge=1, le=100_000)
    """Open connections of each API process; beyond them 503. The process needs 640 open files more, or refuses to
    start."""
    trusted_proxies: Annotated[CommaList, Variables(("KRONOSCOPE_TRUSTED_PROXIES",), shown="empty")] = ()
    """Comma list of addresses and networks of reverse proxies that write `X-Forwarded-For`, `gateway` for the default
    route. The client is the last address in the header that is not listed. Other headers are ignored. Without one
    beyond loopback the API listens on loopback alone."""
    body_limit_bytes: Annotated[int, Variables()] = 256 * 1024
    body_seconds: float = Field(10, ge=0)
    """Time for the body of a request before the answer 408."""
    database_seconds: float = Field(8, ge=0.1, le=600)
    """Time for all queries of a request before the answer 503."""
    estimate_seconds: float = Field(10, ge=0)
    """How long `POST /v1/estimates` waits before the answer 202; 0 answers at once."""
    signed_seconds: int = Field(300, ge=0, le=604_800)
    """How long signed addresses of a bucket are valid; 0 sends files through the API."""
    streams: int = Field(200, ge=0)
    """Open streams of events in each API process, at most half of its connections; beyond them 503."""
    streams_per_key: int = Field(3, ge=0)
    """Open streams of each key in each API process; beyond them 429."""
    stream_seconds: float = Field(600, ge=0.05, le=86_400)
    """How long a stream lasts before its reader must reconnect."""
    stream_idle_seconds: float = Field(15, ge=0.05, le=86_400)
    """Seconds between keep-alives in a stream without events; less than any proxy's read timeout."""
    long_polls: int = Field(200, ge=0)
    """Concurrent requests with `wait` in each API process, at most a quarter of its connections; beyond them they are
    answered at once."""
    long_polls_per_key: int = Field(50, ge=1, le=100_000)
    """The same of each key; beyond them 429."""
    requests_per_second: float = Field(100, ge=0, le=100_000)
    """Requests of each key a second, with bursts of twice as many, in each API process; beyond them 429. 0: no
    limit."""
    requests_per_key: int = Field(2, ge=1, le=10_000)
    """Concurrent requests of each key in each API process. 32 times as many wait; beyond them 429."""
    refused_per_minute: int = Field(60, ge=0, le=1_000_000)
    """Requests without a valid key of each client address a minute that get 401, in each API process; beyond them 429.
    Valid keys of the address are still served. 0: no limit."""
    queued_jobs: int = Field(1000, ge=1, le=1_000_000)
    """Waiting jobs and estimates of each tenant; beyond them 429."""
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
        if not is_loopback(self.host) and all(is_loopback(each.partition("/")[0]) for each in self.trusted_proxies):
            raise SettingsInvalid(
                f"KRONOSCOPE_HOST is {self.host}, but only a proxy bounds silent and slow connections: name its "
                "address in KRONOSCOPE_TRUSTED_PROXIES (docs/operations.md), or bind to 127.0.0.1"
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
