"""The folder that a foreground run fills: ``job.json``, ``results.json``, ``log.jsonl``, ``artifacts/``.

``job.json`` says at any time how the run stands; a reader who finds it ``succeeded`` finds the rest
complete. The rows that an earlier run left are set aside until the new one has its first, and come back where
it is refused or stopped before. JSON files are replaced whole (temporary file, fsync, rename); the log
grows by whole lines.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from catalog.frames import (
    ArtifactWritten,
    CacheAnswer,
    CacheAsked,
    CacheFilled,
    Divided,
    Failed,
    Finished,
    Frame,
    LayerDone,
    LogLine,
    Planned,
    Started,
    Summarised,
)
from catalog.record import FieldError, canonical_json, plain
from catalog.responses.reproduction import Run, compare_runs, reason_unreproducible
from worker.foreground.cache_rows import RunCache
from worker.foreground.output_lock import OutputInUse, OutputLock
from worker.process.log_lines import LogFormatter

_FORMAT = "kronoscope.run/1"
_OURS = ("results.json", "log.jsonl", "artifacts")
_SCRATCH = ".waiting"
_EARLIER = ".earlier"
_PIECES = ".pieces"
_BASES = "factors/bases"
_PART = re.compile(r"[\w\-][\w.\-]{0,127}", re.ASCII)


class OutputRefused(ValueError):
    """The folder cannot take the results; the message says why and what to do."""

    def __init__(self, message: str, code: str = "output_refused") -> None:
        super().__init__(message)
        self.code = code
        """The stable name of the failure."""


class OutputFolder:
    """One run's folder; the only writer of everything in it but the artifacts' bytes."""

    def __init__(self, path: Path, request: Mapping[str, Any], document: object, echo: Callable[[Frame], None]) -> None:
        """Take the folder over for what a request asks, setting aside what an earlier run left in it.

        ``OutputRefused`` if another run is writing into it, or it cannot take the results.
        """
        self._named = path
        self.path = path.absolute()
        self.artifacts = self.path / "artifacts"
        self.cache = RunCache(request, self.artifacts)
        self.echo = echo
        self.scratch = self.path / _SCRATCH
        """Scratch folder; a run of the same document that was killed or stopped, or failed for no fault of it, is
        continued from its files, by its plan."""
        self.piece_folders = self.path / _PIECES
        """Folder in which the pieces of a divided job are computed."""
        self.original: Run | None = None
        """The run that this one reproduces."""
        self._lock = self._take_lock()
        try:
            self._take_over(request, document)
        except OSError as error:
            self._lock.release()
            raise self._unusable(error) from error
        except BaseException:
            self._lock.release()
            raise

    def _take_lock(self) -> OutputLock:
        """Make the folder, and take its lock for as long as the run lasts."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return OutputLock(self.path)
        except OSError as error:
            raise self._unusable(error) from error
        except OutputInUse as error:
            raise OutputRefused(
                f"the output folder {self._named} is in use by another run; wait for its end, or give another --output",
                "output_in_use",
            ) from error

    def _unusable(self, error: OSError) -> OutputRefused:
        return OutputRefused(
            f"the output folder {self._named} cannot be used: {error.strerror}; give a folder that you may write"
        )

    def _take_over(self, request: Mapping[str, Any], document: object) -> None:
        """Begin the record of this run, setting aside what an earlier run left."""
        begun = self._begun_run(document)
        self.plan: dict[str, Any] | None = None if begun is None else begun["plan"]
        divided = {} if begun is None else {name: begun.get(name) or [] for name in ("pieces", "artifacts")}
        self._started, self._clock = datetime.now(UTC), time.monotonic()
        self._staying: list[str] = []
        self._formatter = LogFormatter(document)
        self._rows: list[dict[str, Any]] = []
        self._summary: dict[str, Any] = {}
        self._job: dict[str, Any] = {
            "format": _FORMAT,
            "document": document,
            "state": "running",
            "started_at": self._started.isoformat(),
            "finished_at": None,
            "seconds": None,
            "environment": None,
            "plan": self.plan,
            "failure": None,
            "artifacts": [],
            "pieces": [],
        }
        if divided.get("pieces"):
            self._job |= divided
        self._set_aside(replace=request.get("replace") is True)
        self._write("job.json", self._job)
        self.artifacts.mkdir(exist_ok=True)
        self._log: IO[bytes] = (self.path / "log.jsonl").open("ab", buffering=0)
        if begun is not None:
            said = f"{self._named} holds a run of this document that did not end, which goes on"
            self.echo(LogLine(level="warning", message=f"{said}; to begin anew give another folder"))

    def take(self, frame: Frame, answer: Callable[[CacheAnswer], None]) -> None:
        """Write one frame of the job's own attempts, and echo it with what is to be said of it."""
        if isinstance(frame, CacheAsked):
            answer(self.cache.answer(frame))
            return
        said = self.cache.take(frame) if isinstance(frame, CacheFilled) else frame
        if said is None:
            return
        self.write(said)
        for each in (said, *self._formatter.lines(said)):
            self.echo(each)

    def write(self, frame: Frame) -> None:
        """Write down one frame."""
        match frame:
            case Started():
                self._job["environment"] = dict(frame.environment)
                self._write("job.json", self._job)
            case Planned():
                self.plan = dict(frame.plan)
                self._job["plan"] = self.plan
                self._write("job.json", self._job)
            case LayerDone():
                shutil.rmtree(self.path / _EARLIER, ignore_errors=True)
                digest = hashlib.sha256(canonical_json(frame.outcome).encode()).hexdigest()
                self._rows.append({**frame.outcome, "observed": dict(frame.observed), "sha256": digest})
                self._log.write(canonical_json(_log_record(frame)).encode() + b"\n")
            case ArtifactWritten():
                require_artifact(self.artifacts, frame)
                listed = plain(frame)
                del listed["frame"]
                others = [each for each in self._job["artifacts"] if each["name"] != frame.name]
                self._job["artifacts"] = [*others, listed]
            case Summarised():
                self._summary[frame.kind] = dict(frame.summary)
            case Divided():
                self._job["pieces"] = [*self.pieces, *(dict(each) for each in frame.pieces)]
                self._write("job.json", self._job)
            case Finished():
                self._drop_bases()
                self._job |= {name: value for name, value in plain(frame).items() if name != "frame"}
                if self.original is not None:
                    run = run_of("", self._job, {"summary": self._summary, "layers": self._rows})
                    self._job["reproduction"] = plain(compare_runs(self.original, run))
            case _:
                pass

    @property
    def pieces(self) -> list[dict[str, Any]]:
        """The pieces of every round that the job was divided into so far, in the order of the rounds."""
        pieces: list[dict[str, Any]] = self._job["pieces"]
        return pieces

    def end(self, state: str, failure: Failed | None) -> None:
        """Write the results, then the last state: in this order, so that `succeeded` promises them.

        A run that was refused or stopped before its first row gives back the rows that it found. Of one that was
        stopped otherwise, or whose computing process was killed for instance, checkpoints and pieces stay: the next run
        of its document goes on.
        """
        try:
            self._end(state, failure)
        finally:
            self._lock.release()

    def _end(self, state: str, failure: Failed | None) -> None:
        self._log.close()
        self._job["state"] = state
        if failure is not None:
            self._job["failure"] = {name: value for name, value in plain(failure).items() if name != "frame"}
        goes_on = self.plan is not None and _goes_on(self._job)
        refused = failure.category == "usage" if failure is not None else state == "cancelled"
        if refused and not self._rows and (self.path / _EARLIER).exists() and (self._holds_rows() or not goes_on):
            self._give_back()
            return
        # layers arrive by size
        kinds = list(dict.fromkeys(row["kind"] for row in self._rows))
        rows = sorted(self._rows, key=lambda row: (kinds.index(row["kind"]), row["ordinal"]))
        self._write("results.json", {"summary": self._summary, "layers": rows})
        self._job["summary_sha256"] = hashlib.sha256(canonical_json(self._summary).encode()).hexdigest()
        # a clock that is set back meanwhile ends no run before its start
        self._job["finished_at"] = max(datetime.now(UTC), self._started).isoformat()
        self._job["seconds"] = time.monotonic() - self._clock
        self._write("job.json", self._job)
        for name in (_EARLIER,) if goes_on else (_SCRATCH, _EARLIER, _PIECES):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def _drop_bases(self) -> None:
        """Remove the eigenbases that a divided job stored for its pieces: they were needed by those alone."""
        if self.pieces:
            shutil.rmtree(self.artifacts / _BASES, ignore_errors=True)
            others = [each for each in self._job["artifacts"] if not each["name"].startswith(f"{_BASES}/")]
            self._job["artifacts"] = others

    def _begun_run(self, document: object) -> dict[str, Any] | None:
        """Return the record of a run of the same document that was planned, and ended before it was done."""
        found = self._earlier_run()
        if found is None or found.get("document") != document or not isinstance(found.get("plan"), dict):
            return None
        return found if _goes_on(found) else None

    def _set_aside(self, *, replace: bool) -> None:
        left = [name for name in _OURS if (self.path / name).exists()]
        earlier = self.path / _EARLIER
        if (left or (self.path / "job.json").exists()) and self._earlier_run() is None:
            raise OutputRefused(
                f"the output folder {self.path} holds {', '.join(left) or 'job.json'} that no run of Kronoscope wrote;"
                " give another folder, or an empty one"
            )
        if self.plan is None and not replace and self._holds_rows():
            raise OutputRefused(
                f"the output folder {self.path} holds the results of an earlier run; give another folder, or --force"
            )
        goes_on = [] if self.plan is None else [_SCRATCH, _PIECES, *(["artifacts"] if self.pieces else [])]
        moved = [name for name in (*_OURS, _SCRATCH, _PIECES) if name not in goes_on and (self.path / name).exists()]
        if earlier.exists() or (goes_on and not self._holds_rows()):
            # what a run that did not end left is not worth more than what was set aside for it
            self._remove(moved)
            return
        self._staying = goes_on
        job = self.path / "job.json"
        if moved or job.exists():
            earlier.mkdir()
        if job.exists():
            shutil.copyfile(job, earlier / "job.json")
        for name in moved:
            (self.path / name).rename(earlier / name)

    def _holds_rows(self) -> bool:
        """Return whether an earlier run measured a layer; what was refused or stopped before is worth nothing."""
        logs = (self.path / "log.jsonl", self.path / _EARLIER / "log.jsonl")
        return any(log.is_file() and log.stat().st_size > 0 for log in logs)

    def _give_back(self) -> None:
        self._remove(name for name in (*_OURS, "job.json", _SCRATCH, _PIECES) if name not in self._staying)
        earlier = self.path / _EARLIER
        for found in earlier.iterdir():
            found.rename(self.path / found.name)
        earlier.rmdir()

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _earlier_run(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self.path / "job.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("format") == _FORMAT else None

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False)
        replace_whole(self.path / name, text.encode() + b"\n")


def replace_whole(path: Path, content: bytes) -> None:
    """Write a file under another name, and let it take its place once it is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _log_record(frame: LayerDone) -> dict[str, Any]:
    """One line of the reproducibility log, flat."""
    return {
        "kind": frame.kind,
        "ordinal": frame.ordinal,
        "layer": frame.layer,
        "status": frame.outcome.get("status"),
        "reason": frame.outcome.get("reason"),
        **(frame.outcome.get("record") or {}),
        **frame.observed,
    }


def _goes_on(job: Mapping[str, Any]) -> bool:
    """Return whether the next run goes on with one of this record: killed, stopped, or failed by no own fault."""
    failure = job.get("failure")
    if isinstance(failure, dict):
        return failure.get("category") != "usage" or failure.get("code") == "deadline_exceeded"
    return job.get("state") in ("running", "cancelled")


def run_of(name: str, job: Mapping[str, Any], results: Mapping[str, Any]) -> Run:
    """Return a run by the contents of its `job.json`, which is its manifest too, and of its `results.json`."""
    files = {each["name"]: each["sha256"] for each in job["artifacts"]}
    return Run(name, job, job["plan"], results["layers"], results["summary"], files)


def read_original(document: Any, output: Path) -> Run | None:  # noqa: ANN401 - the child has not judged it yet
    """Read the run that a document reproduces, if it does; a FieldError says why it cannot be reproduced."""
    named = document.get("reproduces") if isinstance(document, dict) else None
    if not isinstance(named, str):
        return None
    folder = Path(named)
    try:
        job = json.loads((folder / "job.json").read_bytes())
        why = reason_unreproducible(job["state"], job, job["document"], document)
        original = None if why else run_of(named, job, json.loads((folder / "results.json").read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"names {named}, which cannot be read as a run ({error}); give the folder of a `kronoscope run`"
    if why is None and folder.resolve() == output.resolve():
        why = f"names {named}, which stays as it is; give another folder for the output"
    if why is not None:
        raise FieldError("reproduces", why)
    return original


class ArtifactMismatch(ValueError):
    """The announced artifact is not what stands on the disk; it must not be listed."""


def require_artifact(root: Path, frame: ArtifactWritten) -> Path:
    """Check a file that a child announced, and return its path.

    ``ArtifactMismatch`` if the name leaves the folder, a link is in the way, or size or digest differ.
    """
    parts = frame.name.split("/")
    if not 1 <= len(parts) <= 4 or not all(_PART.fullmatch(part) for part in parts):
        raise ArtifactMismatch(f"{frame.name[:200]!r} is not a name for an artifact")
    path = root.joinpath(*parts)
    if path.parent.resolve() != root.resolve().joinpath(*parts[:-1]):
        raise ArtifactMismatch(f"artifact {frame.name} is reached through a link")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ArtifactMismatch(f"artifact {frame.name} was announced and cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != frame.size_bytes:
            raise ArtifactMismatch(
                f"artifact {frame.name} has {status.st_size:,} bytes where {frame.size_bytes:,} were announced"
            )
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != frame.sha256:
        raise ArtifactMismatch(f"artifact {frame.name} has sha256 {digest}, announced was {frame.sha256}")
    return path
