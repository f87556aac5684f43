"""The declaration of a transaction on PostgreSQL: the tenant whose rows it sees, with a proof that it may.

::

    secret   pbkdf2(password of the role that logs in)              the tables' owner keeps a copy in `proof_keys`
    proof    sha256(secret, sha256(secret, declared))

Whatever a statement contains can call ``set_config``, so a declaration alone would keep no injected SQL from another
tenant. The proof of another tenant cannot be made within the database: policies take what `declared_tenant` returns,
which holds the proof against the secret, and the API's role may not read that. Without a secret in `proof_keys`, where
the roles were not made, a declaration is believed as it is.

What serves all tenants declares a purpose in a tenant's place. Requests have three, each of which reads two or three
tables and writes none; `*` is for the work between requests, and for operators.
"""

import functools
import hashlib
from typing import Literal

DECLARE = "SELECT set_config('kronoscope.tenant', %s, %s), set_config('kronoscope.proof', %s, %s)"
"""The statement that declares, in the driver's notation."""

Purpose = Literal["*", "*keys", "*events", "*fleet"]

ALL_TENANTS: Purpose = "*"
"""Declared by what works for all tenants, on all tables."""
KEYS: Purpose = "*keys"
"""Declared to find the tenant of a key: reads `api_keys`."""
EVENTS: Purpose = "*events"
"""Declared to wake the requests that wait for jobs: reads `jobs` and `job_events`."""
FLEET: Purpose = "*fleet"
"""Declared to tell where a job would run: reads `jobs`, `device_leases` and `tenants`."""

_ROUNDS = 4096
"""As many as PostgreSQL takes for the password's own digest."""


@functools.lru_cache(maxsize=16)
def secret_of(password: str) -> str:
    """Return the secret, 64 hexadecimal digits, that follows from a role's password."""
    return hashlib.pbkdf2_hmac("sha256", password.encode(), b"kronoscope declared tenant", _ROUNDS).hex()


def declaration(password: str, declared: str, *, for_session: bool = False) -> tuple[str, bool, str, bool]:
    """Return the parameters of `DECLARE`."""
    key = secret_of(password).encode()
    proof = hashlib.sha256(key + hashlib.sha256(key + declared.encode()).digest()).hexdigest()
    return declared, not for_session, proof, not for_session
