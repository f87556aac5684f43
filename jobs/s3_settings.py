"""Which bucket keeps the artifacts, and how it is reached: ``KRONOSCOPE_ARTIFACTS=s3://bucket/prefix``."""

import re
from dataclasses import field
from urllib.parse import urlsplit

from catalog.record import record
from jobs.errors import SettingsInvalid

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_PREFIX = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)*")


@record
class S3Settings:
    """One prefix of one bucket of any S3-compatible store."""

    bucket: str
    prefix: str
    """Empty, or ends with a slash."""
    region: str
    endpoint: str
    """Where the service reaches the store."""
    public_endpoint: str
    """Where callers reach it: signed addresses begin with it."""
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuse what no store answers to."""
        if not _BUCKET.fullmatch(self.bucket) or not _PREFIX.fullmatch(self.prefix):
            raise SettingsInvalid("KRONOSCOPE_ARTIFACTS names no bucket; write it as s3://bucket or s3://bucket/prefix")
        for name, url in (("ENDPOINT", self.endpoint), ("PUBLIC_ENDPOINT", self.public_endpoint)):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
                raise SettingsInvalid(f"KRONOSCOPE_S3_{name} is no address; write one like https://minio.example:9000")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise SettingsInvalid(
                "of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY one is missing; give both, or neither where the "
                "machine has a role"
            )
