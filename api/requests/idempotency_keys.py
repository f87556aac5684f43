"""The check of an idempotency key, the same for a job that is stored and for a document that is only validated."""

import re

from jobs.errors import IdempotencyKeyRefused

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def check_idempotency_key(key: str | None) -> None:
    """Refuse a key that the ledger could not store.

    Args:
        key: The value of the header `Idempotency-Key`; None where it was not sent.

    Raises:
        IdempotencyKeyRefused: If it is not 1 to 255 visible ASCII characters.
    """
    if key is not None and not _KEY.fullmatch(key):
        raise IdempotencyKeyRefused(
            f"must be 1 to 255 visible ASCII characters without blanks (got {len(key):,} characters); take a UUID, or "
            "leave the header out"
        )
