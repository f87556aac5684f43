"""Errors of the ledger, sorted by who must act.

::

    LedgerError
    ├── UsageError           the caller: mend the request
    │   ├── DocumentRefused      a job document with its complaints
    │   ├── IdempotencyConflict  one key, two documents
    │   ├── ParameterRefused     a header or query parameter: PageRefused
    │   ├── JobEnded             a schedule for a job that needs none any more
    │   ├── JobNotFound          absent, or another tenant's: the same answer
    │   ├── JobStillActive       delete before cancel
    │   ├── QuotaExceeded        the tenant's files take all that they may
    │   ├── UploadRefused        sent by two at once, or other than declared
    │   └── ClassesInvalid       the autoscaler's file of machine classes
    ├── TransientError       we, by trying again
    │   ├── LedgerUnavailable    the database does not answer
    │   ├── StoreUnavailable     the store of artifacts does not answer
    │   ├── LeaseLost            another attempt owns the job now: stop and write nothing
    │   └── LauncherFailed       a launcher refused, or did not answer: after the cool-down
    └── FatalError           the operator
        ├── SettingsInvalid
        ├── SchemaOutdated       migrate first
        ├── ArtifactDamaged      a file is not what was recorded
        └── LauncherMissing      a launcher's program is not installed here
"""

from catalog.field_errors import Complaint


class LedgerError(Exception):
    """Anything the ledger says no to.

    A class names the HTTP status, kind and title of its answer, the sentence that stands there in place of its own, and
    the seconds after which to ask again.
    """

    status, kind, title = 500, "internal", "Internal error"
    answer: str | None = None
    retry_seconds: int | None = None


class UsageError(LedgerError):
    """The caller can mend it."""


class TransientError(LedgerError):
    """Trying again later can mend it."""

    status, kind, title = 503, "unavailable", "The service cannot answer now"
    answer: str | None = "a part of the service does not answer; try again"
    retry_seconds = 5


class FatalError(LedgerError):
    """Only the operator can mend it."""

    answer = "the service failed at this request; its operator finds it by the id below"


class DocumentRefused(UsageError):
    """A body that is not a job document; each complaint names a field and the remedy."""

    status, kind, title = 422, "invalid-document", "The job document is not accepted"

    def __init__(self, complaints: tuple[Complaint, ...]) -> None:
        super().__init__("; ".join(f"{each.pointer or '(document)'} {each.message}" for each in complaints))
        self.complaints = complaints
        many = len(complaints)
        self.answer = f"the job document has {many} fault{'' if many == 1 else 's'}; nothing was stored"
        if any(each.code == "body_too_large" for each in complaints):
            self.status = 413


class IdempotencyConflict(UsageError):
    """The key was used before, with another document."""

    status, kind, title = 422, "idempotency-conflict", "Idempotency key used before"

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"this idempotency key already belongs to job {job_id} with another document; take a new key for a new job"
        )


class ParameterRefused(UsageError):
    """A query parameter or header means nothing here; the sentence goes on after its name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class JobNotFound(UsageError):
    """No such job for this tenant."""

    status, kind, title = 404, "not-found", "Not found"

    def __init__(self) -> None:
        super().__init__("there is no such job")


class JobEnded(UsageError):
    """The job has ended, so the request cannot change it."""

    status, kind, title = 409, "job-ended", "The job has ended"

    def __init__(self, job_id: str, state: str) -> None:
        super().__init__(f"job {job_id} is {state} already; submit it again with the schedule that you want")


class JobStillActive(UsageError):
    """The job has an owner that writes to it."""

    status, kind, title = 409, "job-still-active", "The job has not ended"

    def __init__(self, job_id: str, state: str) -> None:
        act = "" if state in ("cancelling", "still stopping") else "cancel it and "
        super().__init__(f"job {job_id} is {state}; {act}wait until it has ended")


class PieceRefused(UsageError):
    """The request is not done to one piece of a divided job, but to the job."""

    status, kind, title = 409, "piece-of-a-job", "The job is a piece of another"

    def __init__(self, job_id: str, parent_id: str) -> None:
        super().__init__(f"job {job_id} is a piece of job {parent_id}, and goes with it; delete that one")


class PageRefused(ParameterRefused):
    """A page was asked for by a key, limit or cursor that means nothing here."""


class QuotaExceeded(UsageError):
    """The tenant's files take, or with one more would take, more than they may."""

    status, kind, title = 429, "quota-exceeded", "No bytes are left"
    # deleting jobs frees bytes at once, but that is the caller's to do
    retry_seconds = 300

    def __init__(self, used_bytes: int, quota_bytes: int, more_bytes: int) -> None:
        wanted = f" and {more_bytes:,} more do not fit" if more_bytes else ""
        super().__init__(
            f"your files take {used_bytes:,} of the {quota_bytes:,} bytes that they may{wanted}; "
            "delete jobs that you no longer need, or ask the operator of this service for more"
        )


class DiskTooSmall(UsageError):
    """A job's plan says that it has more on the disk at a time than an attempt may."""

    def __init__(self, planned_bytes: int, most_bytes: int) -> None:
        super().__init__(
            f"the job's plan has {planned_bytes:,} bytes on the disk at a time, and an attempt may have less than "
            f"{most_bytes:,} in this service; `keep` less, or ask the operator for more (KRONOSCOPE_CHILD_DISK_BYTES)"
        )


class QueueFull(UsageError):
    """A tenant has as many queued jobs as it may, or documents of as many bytes."""

    status, kind, title = 429, "queue-full", "Too many jobs wait"
    retry_seconds = 60


class UploadRefused(UsageError):
    """A part of an upload that another writer sends, or that is other than what was declared."""

    title = "Upload not accepted"

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.kind = code, f"upload-{code}"
        self.status = 422 if code in ("digest", "claim") else 409


class LedgerUnavailable(TransientError):
    """The database did not answer in time, or not at all."""

    answer = None


class StoreUnavailable(TransientError):
    """The store of artifacts did not answer, or refused."""


class LeaseLost(TransientError):
    """The fence moved on: this attempt no longer owns the job."""

    def __init__(self, job_id: str, fence: int) -> None:
        super().__init__(
            f"job {job_id} is no longer held under fence {fence}; this attempt must stop and write nothing"
        )


class SettingsInvalid(FatalError):
    """A setting is missing or makes no sense."""


class SchemaOutdated(FatalError):
    """The database's schema is not the one this code was written for."""


class ArtifactDamaged(FatalError):
    """A file is missing, or is not what was recorded."""

    kind, title = "artifact-damaged", "The file is damaged"
    answer = (
        "the stored file is not what was recorded, so it is not served; put a copy with the recorded `sha256` in its "
        "place, or compute the job again"
    )


class ClassesInvalid(UsageError):
    """The file of machine classes cannot be read, or a field of it makes no sense."""


class LauncherMissing(FatalError):
    """A program that the launcher consists of is not installed on this machine."""


class LauncherFailed(TransientError):
    """The launcher refused to start or to list machines, or did not answer in time."""
