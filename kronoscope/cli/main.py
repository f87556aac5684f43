"""The command ``kronoscope``.

Exit codes: 0 done; 1 a fault of this program; 2 the input or its use is wrong; 3 the service (or
the machine) cannot do it now; 4 a failure that an operator must look into; 5 stopped or cancelled.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from catalog import ANALYSES
from catalog.record import plain
from catalog.responses import JobView, ResultsView
from kronoscope.cli.devices import devices
from kronoscope.cli.documents import DocumentUnreadable, read_document
from kronoscope.cli.keys import CODES, keys
from kronoscope.cli.plan_options import Budget, Device
from kronoscope.cli.run_job import NotInstalled, Outcome, run_job
from kronoscope.cli.schedule_options import Deadline, Priority, Within, with_schedule
from kronoscope.cli.serve import ServiceFailed, exec_module, serve_embedded
from kronoscope.cli.tenants import tenants
from kronoscope.cli.worker import worker
from kronoscope.client.client import Client, ClientError, DownloadFailed, ServiceUnreachable
from kronoscope.client.responses import build_layer, build_summary
from kronoscope.display.plan_tables import show_plan
from kronoscope.display.progress import display_for
from kronoscope.display.results import placement_problem, read_memory_curve, show_progress, show_results
from kronoscope.display.tables import job_table

OK, INTERNAL, USAGE, TRANSIENT, FATAL, STOPPED = range(6)
_CATEGORIES = {"usage": USAGE, "transient": TRANSIENT, "fatal": FATAL}
_CACHE_BYTES = 20 * 2**30
"""The most that the cache of a foreground run may hold."""

app = typer.Typer(
    name="kronoscope",
    help="Measure the curvature of trained neural networks, layer by layer.",
    epilog=CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")

Document = Annotated[Path, typer.Argument(metavar="JOB", help="Job document: YAML, or JSON where it ends in .json.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set one field, e.g. collection.batch_size=32.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines, and no progress.")]
Url = Annotated[str | None, typer.Option("--url", help="The service; default KRONOSCOPE_URL or http://127.0.0.1:8000.")]
Store = Annotated[Path | None, typer.Option(help="Folder of fetched and trained models.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing from the hub.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]


def _out() -> Console:
    """Return the console for results, 100 columns wide where it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=100)


def _err() -> Console:
    return Console(stderr=True, highlight=False)


def _fail(code: int, lines: Sequence[str]) -> NoReturn:
    """Print each fault on standard error and exit with ``code``."""
    raise typer.Exit(_report_errors(code, lines))


@app.command(epilog=CODES)
def run(  # noqa: PLR0913, PLR0917 - each is an option of the command line
    document: Document,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for job.json, results.json, log.jsonl, artifacts/.")
    ],
    settings: Settings = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Computing threads; default: as torch chooses.")
    ] = None,
    store: Store = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of factors that runs of the same collection share; default: none.")
    ] = None,
    offline: Offline = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every line of the job's log.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a job here, in the foreground, without any service."""
    request = _request(read_document(document, settings or ()), store, offline=offline) | {
        "threads": threads,
        "cache": None if cache is None else str(cache.absolute()),
        "cache_bytes": _CACHE_BYTES,
        "job": str(output.absolute()),
    }
    with display_for(_err(), silent=as_json) as display:
        outcome = run_job(request, output, display, verbose=verbose)
    if as_json:
        _print_json({"output": str(output), "finished": outcome.finished, "summary": outcome.summary,
                     "failure": None if outcome.failure is None else _public(outcome)})  # fmt: skip
    _require_success(outcome)
    if not as_json:
        show_results(_out(), [build_layer(row) for row in outcome.rows],
                     {kind: build_summary(kind, summary) for kind, summary in outcome.summary.items()},
                     curve=read_memory_curve(output / "artifacts"))  # fmt: skip
        _out().print(f"results in {output}/: results.json, log.jsonl, artifacts/", soft_wrap=True)


@app.command(epilog=CODES)
def plan(
    document: Document,
    settings: Settings = None,
    budget: Budget = None,
    device: Device = None,
    store: Store = None,
    offline: Offline = False,
    url: Annotated[str | None, typer.Option("--url", help="A service that plans it where it would run it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a job without running it, here or in a service: memory and seconds of each stage, from shapes alone."""
    wanted = read_document(document, settings or ())
    if budget is not None:
        wanted["memory"] = {**(wanted.get("memory") or {}), "device": budget, "host": budget}
    if url is not None and device is not None:
        _fail(USAGE, ["--device is for a plan made here; a service plans for the devices it has"])
    if url is None:
        planned = _planned(wanted, store, device, offline=offline, silent=as_json)
    else:
        with Client(url) as client:
            planned = client.estimate(wanted).plan or {}
    _print_json(dict(planned)) if as_json else show_plan(planned, _out())


@app.command(epilog=CODES)
def submit(  # noqa: PLR0913, PLR0917 - each is an option of the command line
    document: Document,
    settings: Settings = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")] = False,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Check everything and submit nothing.")
    ] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key and document give the same job.")] = None,
    priority: Priority = None,
    deadline: Deadline = None,
    within: Within = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job to the service; prints its id."""
    wanted = with_schedule(read_document(document, settings or ()), priority=priority, deadline=deadline, within=within)
    with Client(url) as client:
        if validate_only:
            checked = client.validate(wanted)
            _print_json(checked) if as_json else _out().print("the document is valid; nothing was submitted")
            return
        job = client.submit(wanted, idempotency_key=idempotency_key)
        if (note := placement_problem(job)) is not None:
            _err().print(note, soft_wrap=True, markup=False)
        if wait:
            if not as_json:
                _err().print(f"job {job.id}", soft_wrap=True)
            _watch(client, job.id, as_json=as_json)
        elif as_json:
            _print_json(plain(job))
        else:
            sys.stdout.write(f"{job.id}\n")


@app.command(epilog=CODES)
def watch(job_id: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Follow a job to its end; ctrl-C leaves it running, and watching again goes on."""
    with Client(url) as client:
        _watch(client, job_id, as_json=as_json)


@app.command(epilog=CODES)
def results(
    job_id: JobId,
    download: Annotated[Path | None, typer.Option(help="Folder to download the job's files into.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print a job's table, or everything as JSON; download its files."""
    with Client(url) as client:
        job_results = client.results(job_id)
        if as_json:
            _print_json(plain(job_results) | {"layers": [plain(row) for row in client.layers(job_id)]})
        else:
            _show_tables(client, job_results)
            if not job_results.job.ended:
                _err().print(f"the job is {job_results.job.state}: these are the layers so far")
        if download is not None:
            _download(client, job_results, download, silent=as_json)


@app.command(epilog=CODES)
def cancel(job_id: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel a queued or running job."""
    with Client(url) as client:
        job = client.cancel(job_id)
    _print_json(plain(job)) if as_json else _out().print(f"{job.id} is {job.state}", soft_wrap=True)


@app.command("jobs", epilog=CODES)
def list_jobs(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only jobs of this analysis.")] = None,
    label: Annotated[str | None, typer.Option(help="Only jobs with this label: name=value.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List your jobs, newest first."""
    with Client(url) as client:
        listed = list(client.jobs(state=state, kind=kind, label=label))
    _print_json([plain(job) for job in listed]) if as_json else _out().print(job_table(listed))


@app.command(epilog=CODES)
def menu(as_json: AsJson = False) -> None:
    """List the analyses that can be asked for."""
    if as_json:
        _print_json(
            [{"kind": each.kind, "title": each.title, "description": each.description} for each in ANALYSES.values()]
        )
        return
    table = Table(pad_edge=False, show_edge=False)
    table.add_column("kind", no_wrap=True)
    table.add_column("results")
    for each in ANALYSES.values():
        table.add_row(each.kind, f"{each.title}. {each.description}")
    _out().print(table)


@app.command(epilog=CODES)
def serve(
    embedded: Annotated[
        bool, typer.Option("--embedded", help="API and worker here, on SQLite, for this machine only.")
    ] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port; default 8000, or any free one.")] = None,
    data_dir: Annotated[Path, typer.Option(help="Folder of ledger, artifacts, models and logs.")] = Path(".kronoscope"),
    allow_factory: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:CALLABLE", help="A factory that jobs may name; * for all. May be repeated."),
    ] = None,
    allow_directory: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="A folder that jobs may read; * for all. May be repeated."),
    ] = None,
) -> None:
    """Serve the API: with its worker (--embedded), or alone as KRONOSCOPE_* settings say."""
    for name, listed in (("FACTORIES", allow_factory), ("DIRECTORIES", allow_directory)):
        if listed:
            os.environ[f"KRONOSCOPE_ALLOW_{name}"] = ",".join(listed)
    if embedded:
        raise typer.Exit(serve_embedded(data_dir, port, lambda text: _err().print(text, soft_wrap=True)))
    if port is not None:
        os.environ["KRONOSCOPE_PORT"] = str(port)
    raise typer.Exit(exec_module("api"))


app.command(epilog=CODES)(worker)
app.command(epilog=CODES)(devices)


@app.command("version", epilog=CODES)
def show_version() -> None:
    """Print the version."""
    sys.stdout.write(f"kronoscope {version('kronoscope')}\n")


def _download(client: Client, results: ResultsView, folder: Path, *, silent: bool) -> None:
    try:
        with display_for(_err(), silent=silent) as display:
            for done, artifact in enumerate(results.artifacts, start=1):
                client.download(results.job.id, artifact, folder)
                display.update("download", done, len(results.artifacts), "files")
    except OSError as error:
        _fail(USAGE, [f"{folder} cannot be written ({error.strerror}); give a folder that you may write, with room"])


def _request(document: dict[str, Any], store: Path | None, *, offline: bool) -> dict[str, Any]:
    """Return the runner's request; every folder and factory may be named in the foreground."""
    return {
        "document": document,
        "paths": [str(Path.cwd())],
        "allowed": {"factories": ["*"], "directories": ["*"]},
        "store": str((store or _default_store()).absolute()),
        "offline": offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
    }


def _planned(
    document: dict[str, Any], store: Path | None, device: str | None, *, offline: bool, silent: bool
) -> Mapping[str, Any]:
    request = _request(document, store, offline=offline) | {"estimate": True, "device": device}
    with tempfile.TemporaryDirectory(prefix="kronoscope-plan-") as folder, display_for(_err(), silent=silent) as shown:
        outcome = run_job(request, Path(folder) / "plan", shown)
    _require_success(outcome)
    return outcome.plan


def _default_store() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kronoscope"


def _watch(client: Client, job_id: str, *, as_json: bool) -> None:
    """Show every change until the job ends; exit with the code of its outcome."""
    job: JobView | None = None
    try:
        with display_for(_err(), silent=as_json) as display:
            for job in client.follow(job_id):
                show_progress(job, display)
    except KeyboardInterrupt:
        _fail(STOPPED, [f"no longer watching; the job goes on: `kronoscope watch {job_id}` shows it again"])
    if job is None:
        _fail(INTERNAL, ["the service sent no answer about the job"])
    if as_json:
        _print_json(plain(job))
    if job.failure is not None:
        pointer = f"{job.failure.pointer} " if job.failure.pointer else ""
        _fail(_CATEGORIES.get(job.failure.category, FATAL), [f"{pointer}{job.failure.message}"])
    if job.state == "cancelled":
        _fail(STOPPED, ["the job was cancelled"])
    if not as_json:
        _show_tables(client, client.results(job_id))


def _show_tables(client: Client, results: ResultsView) -> None:
    rows, curve = list(client.layers(results.job.id)), client.memory_curve(results)
    show_results(_out(), rows, results.summary, results.job.kinds, curve)


def _require_success(outcome: Outcome) -> None:
    if (failure := outcome.failure) is not None:
        pointer = f"{failure.pointer} " if failure.pointer and "\n" not in failure.message else ""
        lines = [f"{pointer}{line}" for line in failure.message.split("\n")]
        if failure.category == "fatal" and failure.detail:
            sys.stderr.write(f"{failure.detail}\n")
        _fail(_CATEGORIES[failure.category], lines)
    if outcome.stopped or outcome.interrupted:
        _fail(STOPPED, ["the job was stopped; nothing runs on"])
    if not outcome.finished:
        said = [f"  {line}" for line in outcome.last_output[-15:]]
        _fail(FATAL, ["the runner ended without a result; its last lines:", *said])


def _public(outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in plain(outcome.failure).items() if name not in ("frame", "detail")}


def _print_json(value: Any) -> None:  # noqa: ANN401 - any JSON
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def run_command(command: Callable[[], object]) -> int:
    """Run a command, and turn its errors into sentences and an exit code.

    Args:
        command: The command line application, or one of its commands.

    Returns:
        The exit code (see the module's first lines).
    """
    try:
        command()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK
    except ClientError as error:
        may_pass = isinstance(error, (ServiceUnreachable, DownloadFailed)) or error.status == 429 or error.status >= 500
        return _report_errors(TRANSIENT if may_pass else USAGE, error.lines)
    except (DocumentUnreadable, NotInstalled, ServiceFailed) as error:
        return _report_errors(TRANSIENT if isinstance(error, ServiceFailed) else USAGE, [str(error)])
    return OK


def _report_errors(code: int, lines: Sequence[str]) -> int:
    for line in lines:
        sys.stderr.write(f"error: {line}\n")
    return code


def main() -> None:
    """Run the program; its entry point."""
    sys.exit(run_command(app))


if __name__ == "__main__":
    main()
