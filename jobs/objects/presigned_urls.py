"""Presigned URLs: each gives its holder read access to one object of an S3 store for a time, without credentials.

The query carries the signature (AWS Signature Version 4): with the day's key
``k = HMAC(HMAC(HMAC(HMAC("AWS4" + secret, date), region), "s3"), "aws4_request")`` it is
``HMAC(k, "AWS4-HMAC-SHA256" ‖ time ‖ scope ‖ SHA-256(request))``, where the request is method,
path, sorted query, host and ``UNSIGNED-PAYLOAD``. obstore signs too, but nothing beyond the key:
under which name and type the store sends an object that several jobs list under different names
has to be part of what is signed.

References:
    Amazon S3 API reference, Authenticating requests: using query parameters (AWS Signature Version 4)
"""

import hashlib
import hmac
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from jobs.s3_settings import S3Settings

_ALGORITHM = "AWS4-HMAC-SHA256"


def signed_url(
    settings: S3Settings, key: str, seconds: int, *, answers: dict[str, str], at: datetime | None = None
) -> str | None:
    """Return an address that answers GET for one object without credentials."""
    if settings.access_key_id is None or settings.secret_access_key is None:
        return None
    moment = (at or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{moment[:8]}/{settings.region}/s3/aws4_request"
    place = urlsplit(settings.public_endpoint)
    path = quote(f"{place.path}/{settings.bucket}/{settings.prefix}{key}", safe="/-_.~")
    query = {
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{settings.access_key_id}/{scope}",
        "X-Amz-Date": moment,
        "X-Amz-Expires": str(seconds),
        "X-Amz-SignedHeaders": "host",
    }
    if settings.session_token is not None:
        query["X-Amz-Security-Token"] = settings.session_token
    query |= {f"response-{name}": value for name, value in answers.items()}
    canonical = "&".join(
        sorted(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query.items())
    )
    request = "\n".join(["GET", path, canonical, f"host:{place.netloc}", "", "host", "UNSIGNED-PAYLOAD"])
    to_sign = "\n".join([_ALGORITHM, moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    day = f"AWS4{settings.secret_access_key}".encode()
    for part in (moment[:8], settings.region, "s3", "aws4_request"):
        day = hmac.digest(day, part.encode(), "sha256")
    signature = hmac.digest(day, to_sign.encode(), "sha256").hex()
    return f"{place.scheme}://{place.netloc}{path}?{canonical}&X-Amz-Signature={signature}"
