"""A broken promise, as the checker tells it."""

from dataclasses import dataclass
from typing import Literal

Promise = Literal["lost", "unexpected", "duplicated", "illegal", "stale", "artifact", "value"]


@dataclass(frozen=True)
class Violation:
    """Which promise, to which job, and how."""

    promise: Promise
    job_id: str | None
    detail: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.job_id or '-'}: {self.detail}"
