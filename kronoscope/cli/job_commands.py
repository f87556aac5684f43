"""The commands on jobs of a service: ``submit``, ``rerun``, ``watch``, ``results``, ``cancel`` and ``jobs``."""

import contextlib
import hashlib
import io
import itertools
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from catalog import ANALYSES
from catalog.record import plain
from catalog.responses.coverage import kinds_of
from catalog.responses.remaining_time import written_remaining
from catalog.responses.views import ArtifactView, JobView, ResultsView
from kronoscope.cli.documents import (
    DocumentUnreadable,
    change_document,
    edit_document,
    read_document,
    unsent_files,
    validate_uploads,
    with_upload,
)
from kronoscope.cli.exit_codes import INTERNAL, SHORT_ID, STOPPED, USAGE, end_as, end_run, fail
from kronoscope.cli.job_source import find_job, find_service_job, is_folder
from kronoscope.cli.options import (
    AsJson,
    Document,
    Download,
    JobId,
    JobOrFolder,
    Parent,
    Settings,
    Upload,
    Url,
    complete,
)
from kronoscope.cli.output import message_console, print_json, result_console, write_error, write_line
from kronoscope.cli.run_folder import read_run
from kronoscope.client.client import Client
from kronoscope.client.responses import Layer
from kronoscope.display.methods import methods_text
from kronoscope.display.plan_tables import show_plan
from kronoscope.display.printable import printable
from kronoscope.display.progress import display_for
from kronoscope.display.results import placement_problem, read_memory_curve, show_progress, show_results
from kronoscope.display.tables import show_series

Priority = Annotated[
    int | None, typer.Option(metavar="-10..10", help="Which of your own waiting jobs goes first; default 0.")
]
Deadline = Annotated[str | None, typer.Option(metavar="MOMENT", help='End it as failed by then: "2026-12-01T12:00Z".')]
Within = Annotated[str | None, typer.Option(metavar="TIME", help="The same from now on: 90m, 4h or 2d.")]


def with_schedule(
    document: dict[str, Any], *, priority: int | None, deadline: str | None, within: str | None
) -> dict[str, Any]:
    """Return a job document with the options in its block `schedule`."""
    options = {"priority": priority, "deadline": deadline, "within": within}
    options = {name: value for name, value in options.items() if value is not None}
    if not options:
        return document
    block = document.get("schedule") or {}
    if not isinstance(block, dict):
        raise DocumentUnreadable("`schedule` is a value, not a block; write `schedule: {priority: 5}`")
    if deadline is not None or within is not None:
        block = {name: value for name, value in block.items() if name not in ("deadline", "within")}
    return {**document, "schedule": {**block, **options}}


_WHOLE_ID_WIDTH = 150


def job_table(jobs: Iterable[JobView], width: int = 100) -> Table:
    """Tabulate jobs, one row each; on a narrow terminal ids are shown by their last part, which every command takes."""
    listed = list(jobs)
    named = any(job.name for job in listed)
    short = width < _WHOLE_ID_WIDTH
    table = Table(pad_edge=False, show_edge=False)
    for heading in ("id", *(["name"] if named else []), "model, data", "kind", "state", "created", "took"):
        # an id must not be cut, so names and kinds wrap
        fixed_width = {"id": SHORT_ID if short else 36, "state": 9, "created": 16, "took": 4}.get(heading)
        table.add_column(heading, no_wrap=fixed_width is not None, overflow="fold", min_width=fixed_width)
    for job in listed:
        cells = [
            job.id[-SHORT_ID:] if short else job.id,
            *([printable(job.name or "–", lines=False)] if named else []),
            ", ".join(printable(_source(job.document.get(part)), lines=False) for part in ("model", "data")),
            ", ".join(job.kinds),
            _state(job),
            (job.created_at or "")[:16].replace("T", " "),
            _took(job),
        ]
        table.add_row(*map(Text, cells))
    return table


def _source(block: Any) -> str:  # noqa: ANN401 - a part of a document, or none
    """Return the name of a model or of data, as the page has it."""
    if not isinstance(block, Mapping):
        return "–"
    return str(next((block[name] for name in ("name", "id", "factory", "path", "source") if block.get(name)), "–"))


def _took(job: JobView) -> str:
    if job.started_at is None or job.finished_at is None:
        return "–"
    span = datetime.fromisoformat(job.finished_at) - datetime.fromisoformat(job.started_at)
    return written_remaining(span.total_seconds())


def _state(job: JobView) -> str:
    """Return the state; of a job that did a part of its work, or kept no full blocks of a part, also which."""
    if job.state != "succeeded":
        percent = None if job.ended or job.progress is None else job.progress.percent
        return job.state if percent is None else f"{job.state} {percent:.0f}%"
    share = job.coverage is not None and job.coverage.status == "partial"
    said = [f"{job.coverage.measured_percent:.1f}%"] if job.coverage is not None and share else []
    if job.refused:
        said.append(f"{len(job.refused)}/{len(job.kinds)} refused")
    state = f"partial {', '.join(said)}" if said else job.state
    state += "\nimported" if job.imported else ""
    kinds = {} if job.coverage is None else kinds_of(job.coverage)
    return "\n".join([state, *(f"{kinds[kind]:.1f}% {kind}" for kind in ("diagonal", "sketched") if kind in kinds)])


_MOST_LISTED = 10**9
_STATES = ("queued", "running", "waiting", "cancelling", "succeeded", "failed", "cancelled")


def submit(  # noqa: PLR0913, PLR0917 - each is an option of the command line
    document: Document,
    settings: Settings = None,
    name: Annotated[str | None, typer.Option(help="A name of your own for the job; lists show it.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")] = False,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Check everything and submit nothing.")
    ] = False,
    upload: Upload = None,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key and document give the same job.")] = None,
    priority: Priority = None,
    deadline: Deadline = None,
    within: Within = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job to the service; prints its id."""
    wanted = with_schedule(read_document(document, settings or ()), priority=priority, deadline=deadline, within=within)
    if name is not None:
        wanted = {**wanted, "name": name}
    with Client(url) as client:
        # nothing is sent for a document that is refused: it would stay in the quota
        checked = validate_uploads(client, wanted, upload or ()) if upload or validate_only else {}
        for path in upload or ():
            with display_for(message_console(), silent=as_json) as display:
                wanted = wanted if validate_only else with_upload(client, wanted, path, display)
                if rest := unsent_files(path):
                    display.line(f"not sent: {', '.join(rest)}")
        if validate_only:
            said = "the document is valid; nothing was submitted" + (", and nothing was sent" if upload else "")
            print_json(checked) if as_json else result_console().print(said)
            return
        _submit(client, wanted, idempotency_key, wait=wait, as_json=as_json)


def rerun(
    job_id: JobId,
    settings: Settings = None,
    name: Annotated[str | None, typer.Option(help="The new job's name; default: the same.")] = None,
    edit: Annotated[bool, typer.Option("--edit", help="Open the document in $VISUAL or $EDITOR first.")] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Plan it: print memory and seconds, and submit nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the new job to its end.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job's document again, with changes; prints the new job's id."""
    with Client(url) as client:
        document = client.document(find_service_job(client, job_id))
        wanted = change_document(document, settings or (), f"job {job_id}")
        if edit:
            wanted = edit_document(wanted)
        if name is not None:
            wanted = {**wanted, "name": name}
        if estimate:
            planned = client.estimate(wanted).plan or {}
            print_json(dict(planned)) if as_json else show_plan(planned, result_console())
        else:
            _submit(client, wanted, None, wait=wait, as_json=as_json)


def _submit(
    client: Client, document: dict[str, Any], idempotency_key: str | None, *, wait: bool, as_json: bool
) -> None:
    """Submit a document and print the job's id; or follow the job to its end."""
    job = client.submit(document, idempotency_key=idempotency_key)
    if (note := placement_problem(job)) is not None:
        message_console().print(note, soft_wrap=True, markup=False)
    if wait:
        if not as_json:
            message_console().print(f"job {job.id}", soft_wrap=True)
        if not _watched(client, job.id, as_json=as_json):
            raise typer.Exit(STOPPED)
    elif as_json:
        print_json(plain(job))
    else:
        write_line(job.id)


def watch(job_id: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Follow a job to its end; ctrl-C leaves it running, and watching again goes on."""
    with Client(url) as client:
        _watched(client, find_service_job(client, job_id), as_json=as_json)


def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on to the job's end.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print a job's log with its states and attempts; of an archived job the states alone are left."""
    with Client(url) as client, contextlib.suppress(KeyboardInterrupt):
        for event in client.events(find_service_job(client, job_id), follow=follow):
            if event.type not in ("log", "state", "started", "crash", "digest_differs"):
                continue
            told = sorted(event.data.items(), key=lambda each: each[0] != event.type)
            said = [f"{name} {value}" for name, value in told if isinstance(value, (str, int))]
            text = event.data.get("message") or ", ".join(said).removeprefix(f"{event.type} ")
            shown = f"{event.at[:19].replace('T', ' ')} {event.data.get('level', event.type):7} {text}"
            print_json(plain(event), indent=None) if as_json else write_line(printable(shown, lines=False))


def results(
    job_id: JobOrFolder,
    download: Download = None,
    overwrite: Annotated[
        bool, typer.Option("--force", "--overwrite", help="Replace other files of the same names there.")
    ] = False,
    methods: Annotated[
        bool, typer.Option("--methods", help="The paragraph and the BibTeX entries that a paper needs.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print a job's table, or everything as JSON, or the text for a paper; download its files."""
    if is_folder(job_id):
        if download is not None:
            fail(USAGE, [f"the files of {job_id} are there already; leave --download out, or give a job's id"])
        found, rows = read_run(Path(job_id))
        _print_results(found, rows, read_memory_curve(Path(job_id) / "artifacts"), methods=methods, as_json=as_json)
        end_run(found.job, rows=len(rows))
        return
    with Client(url) as client:
        found = client.results(find_job(client, job_id))
        if found.job.document.get("series") is not None:
            series = client.series(found.job.id)
            print_json(plain(series)) if as_json else show_series(result_console(), series)
            end_as(found.job)
            return
        rows = list(client.layers(found.job.id))
        curve = None if as_json or methods else client.memory_curve(found)
        _print_results(found, rows, curve, methods=methods, as_json=as_json)
        if download is not None:
            _download(client, found, download, overwrite=overwrite, silent=as_json)
    end_as(found.job, found.layers.count)


def _print_results(
    found: ResultsView, rows: list[Layer], curve: Mapping[str, Any] | None, *, methods: bool, as_json: bool
) -> None:
    text = methods_text(found, rows) if methods else None
    if as_json:
        listed = [plain(row) for row in rows]
        print_json(plain(found) | {"layers": listed} | ({"methods": text} if text is not None else {}))
    elif text is not None:
        write_line(text)
    else:
        _show_tables(found, rows, curve)
        if not found.job.ended:
            message_console().print(f"the job is {found.job.state}: these are the layers so far")


def cancel(job_id: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel a queued or running job."""
    with Client(url) as client:
        job = client.cancel(find_service_job(client, job_id))
    said = f"had already {job.state}" if job.state in ("succeeded", "failed") else f"is {job.state}"
    print_json(plain(job)) if as_json else result_console().print(f"{job.id} {said}", soft_wrap=True)


def list_jobs(  # noqa: PLR0913, PLR0917 - each is an option of the command line
    state: Annotated[
        str | None, typer.Option(autocompletion=complete(_STATES), help="Only jobs in this state.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(autocompletion=complete((*ANALYSES,)), help="Only jobs of this analysis.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only jobs with this label: name=value. May be repeated: all of them.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs whose name has this part.")] = None,
    coverage: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete(("partial", "diagonal")),
            help="Only jobs that were done in part (partial), or with a diagonal alone of some parameters (diagonal).",
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="2d", help='Only jobs of that time, or since a moment: "2026-12-01T12:00Z".')
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="2d", help="Only jobs before that; a time or a moment.")] = None,
    oldest: Annotated[bool, typer.Option("--oldest", help="The oldest first.")] = False,
    parent: Parent = None,
    limit: Annotated[int | None, typer.Option(min=1, max=_MOST_LISTED, help="At most so many; default: all.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List your jobs."""
    with Client(url) as client:
        whole = None if parent is None else client.full_id(parent)
        sort: Literal["newest", "oldest"] = "oldest" if oldest else "newest"
        filters: dict[str, Any] = {
            "state": state,
            "kind": kind,
            "name": name,
            "coverage": coverage,
            "since": since,
            "until": until,
            "parent": whole,
        }
        found = client.jobs(label=label, sort=sort, **filters)
        listed = list(itertools.islice(found, limit))
    console = result_console()
    print_json([plain(job) for job in listed]) if as_json else console.print(job_table(listed, console.width))


def _watched(client: Client, job_id: str, *, as_json: bool) -> bool:
    """Show every change until the job ends, and exit with the code of a bad end; False after ctrl-C."""
    job: JobView | None = None
    try:
        with display_for(message_console(), silent=as_json) as display:
            for job in client.follow(job_id):
                show_progress(job, display)
    except KeyboardInterrupt:
        write_error(f"no longer watching; the job goes on: `kronoscope watch {job_id}` shows it again")
        return False
    if job is None:
        fail(INTERNAL, ["the service sent no answer about the job"])
    if as_json:
        print_json(plain(job))
    if job.state == "succeeded" and job.document.get("series") is not None and not as_json:
        show_series(result_console(), client.series(job_id))
    elif job.state == "succeeded" and not as_json:
        found = client.results(job_id)
        _show_tables(found, list(client.layers(job_id)), client.memory_curve(found))
    end_as(job, client.results(job_id).layers.count if job.state == "cancelled" else None)
    return True


def _show_tables(found: ResultsView, rows: list[Layer], curve: Mapping[str, Any] | None) -> None:
    job = found.job
    for notice in job.notices or ():
        message_console().print(f"warning: {notice}", soft_wrap=True, markup=False)
    show_results(result_console(), rows, found.summary, job.kinds, curve, job.coverage, refused=job.refused)
    for sentence in ((found.manifest or {}).get("reproduction") or {}).get("sentences", ()):
        write_line(sentence)


def _download(client: Client, results: ResultsView, folder: Path, *, overwrite: bool, silent: bool) -> None:
    """Download a job's files; one that is there already is left as it is, and another is not overwritten silently."""
    try:
        missing = [each for each in results.artifacts if overwrite or not _is_there(folder / each.name, each)]
        with display_for(message_console(), silent=silent) as display:
            for done, artifact in enumerate(missing, start=1):
                client.download(results.job.id, artifact, folder)
                display.update("download", done, len(missing), "files")
    except OSError as error:
        fail(USAGE, [f"{folder} cannot be written ({error.strerror}); give a folder that you may write, with room"])


def _is_there(path: Path, artifact: ArtifactView) -> bool:
    """Return whether the file is there; the command ends where another one has its name."""
    if not path.exists():
        return False
    with path.open("rb") if path.is_file() else contextlib.nullcontext(io.BytesIO()) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != artifact.sha256:
            fail(USAGE, [f"{path} is there already, and is another file; give another folder, or --force"])
    return True
