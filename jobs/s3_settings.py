"""S3 settings: the bucket that keeps the artifacts (``KRONOSCOPE_ARTIFACTS=s3://bucket/prefix``), and its access."""

import re
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from jobs.environment import EnvironmentSettings, Variables
from jobs.errors import SettingsInvalid

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_PREFIX = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)*")
_ENDPOINTS = ("KRONOSCOPE_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


class S3Settings(EnvironmentSettings):
    """One prefix of one bucket of any S3-compatible store."""

    bucket: Annotated[str, Variables()]
    prefix: Annotated[str, Variables()]
    """Empty, or ends with a slash."""
    region: Annotated[str, Variables(("AWS_REGION", "AWS_DEFAULT_REGION"))] = "us-east-1"
    """The bucket's region."""
    endpoint: Annotated[str, Variables(_ENDPOINTS, shown="Amazon's, in the region")]
    """Address of the bucket's store."""
    public_endpoint: Annotated[str, Variables(("KRONOSCOPE_S3_PUBLIC_ENDPOINT",), shown="the same")]
    """The store's address for callers, in signed addresses."""
    access_key_id: Annotated[str | None, Variables(("AWS_ACCESS_KEY_ID",), shown="the machine's role")] = Field(
        None, repr=False
    )
    """The bucket's key."""
    secret_access_key: Annotated[str | None, Variables(("AWS_SECRET_ACCESS_KEY",))] = Field(None, repr=False)
    """Its secret."""
    session_token: Annotated[str | None, Variables(("AWS_SESSION_TOKEN",))] = Field(None, repr=False)
    """Its token, if temporary."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Without an endpoint it is Amazon's; without a public one it is the same."""
        region = given.get("region") or cls.model_fields["region"].default
        endpoint = (given.get("endpoint") or f"https://s3.{region}.amazonaws.com").rstrip("/")
        public = (given.get("public_endpoint") or endpoint).rstrip("/")
        return {**given, "endpoint": endpoint, "public_endpoint": public}

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse names and addresses that no store answers to."""
        if not _BUCKET.fullmatch(self.bucket) or not _PREFIX.fullmatch(self.prefix):
            raise SettingsInvalid(
                "KRONOSCOPE_ARTIFACTS does not name a bucket; write it as s3://bucket or s3://bucket/prefix"
            )
        for name, url in (("ENDPOINT", self.endpoint), ("PUBLIC_ENDPOINT", self.public_endpoint)):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
                raise SettingsInvalid(
                    f"KRONOSCOPE_S3_{name} is not an address; write one like https://minio.example:9000"
                )
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise SettingsInvalid(
                "of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY one is missing; give both, or neither where the "
                "machine has a role"
            )
        return self
