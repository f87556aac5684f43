"""The main command, ``kronoscope``; ``kronoscope.cli.exit_codes`` lists its exit codes."""

import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from catalog import ANALYSES
from catalog.analyses.export import EXPORT, EXPORT_FILES
from catalog.record import plain
from catalog.responses.coverage import assess_coverage
from kronoscope.cli import job_commands
from kronoscope.cli.autoscale import autoscale
from kronoscope.cli.compare import compare_jobs
from kronoscope.cli.devices import devices
from kronoscope.cli.documents import change_document, read_document
from kronoscope.cli.exit_codes import CATEGORIES, FATAL, STOPPED, USAGE, fail, require_whole, run_command, trace_lines
from kronoscope.cli.extras import require_extra
from kronoscope.cli.keys import keys
from kronoscope.cli.options import AsJson, Document, JobOrFolder, Offline, Settings, Store, Url, epilog, one_of
from kronoscope.cli.output import message_console, outlast_reader, print_json, result_console, write_error, write_line
from kronoscope.cli.plan_options import Budget, Device
from kronoscope.cli.run_folder import read_json, read_run
from kronoscope.cli.run_job import Outcome, run_job
from kronoscope.cli.serve import FactoryWrong, exec_module, require_factories, serve_embedded
from kronoscope.cli.tenants import tenants
from kronoscope.cli.trackers import TRACKERS, track
from kronoscope.cli.worker import worker
from kronoscope.client.client import Client
from kronoscope.client.responses import build_layer, build_summary
from kronoscope.display.plan_tables import show_plan
from kronoscope.display.progress import display_for
from kronoscope.display.results import read_memory_curve, show_results

_CACHE_BYTES = 20 * 2**30
"""The most that the cache of a foreground run may hold."""

app = typer.Typer(
    name="kronoscope",
    help="Measure the curvature of trained neural networks, layer by layer.",
    epilog=epilog("kronoscope run examples/digits.yaml --output digits"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(asked: bool) -> None:
    """Print the version and end the command."""
    if asked:
        sys.stdout.write(f"kronoscope {version('kronoscope')}\n")
        raise typer.Exit


@app.callback()
def show_options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Measure the curvature of trained neural networks, layer by layer."""


app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")


@app.command(epilog=epilog("kronoscope run examples/digits.yaml --output digits"))
def run(  # noqa: PLR0913, PLR0917 - each is an option of the command line
    document: Document,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for job.json, results.json, log.jsonl, artifacts/.")
    ],
    settings: Settings = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Computing threads; default: what is fastest here, as measured.")
    ] = None,
    store: Store = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of factors that runs of the same collection share; default: none.")
    ] = None,
    offline: Offline = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the results of an earlier run there.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every line of the job's log.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a job here, in the foreground, without any service."""
    wanted = read_document(document, settings or ())
    request = _request(wanted, store, offline=offline) | {
        "threads": threads,
        "cache": None if cache is None else str(cache.absolute()),
        "cache_bytes": _CACHE_BYTES,
        "job": str(output.absolute()),
        "replace": force,
    }
    with display_for(message_console(), silent=as_json) as display:
        outcome = run_job(request, output, display, verbose=verbose)
    measured = assess_coverage(outcome.summary, _min_coverage(wanted))
    if as_json:
        print_json({"output": str(output), "finished": outcome.finished, "summary": outcome.summary,
                    "coverage": plain(measured), "refused": plain(outcome.refused),
                     "failure": None if outcome.failure is None else _public(outcome)})  # fmt: skip
    _require_success(outcome, verbose=verbose)
    if not as_json:
        show_results(result_console(), [build_layer(row) for row in outcome.rows],
                     {kind: build_summary(kind, summary) for kind, summary in outcome.summary.items()},
                     curve=read_memory_curve(output / "artifacts"), measured=measured,
                     refused=outcome.refused)  # fmt: skip
        result_console().print(f"results in {output}/: results.json, log.jsonl, artifacts/", soft_wrap=True)
    require_whole(measured, outcome.refused)


@app.command(epilog=epilog("kronoscope plan examples/digits.yaml --budget 20GiB --device cuda"))
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
        fail(USAGE, ["--device is for a plan made here; a service plans for the devices it has"])
    if url is None:
        planned = _planned(wanted, store, device, offline=offline, silent=as_json)
    else:
        with Client(url) as client:
            planned = client.estimate(wanted).plan or {}
    print_json(dict(planned)) if as_json else show_plan(planned, result_console())


for _name, _command, _arguments in (
    ("submit", job_commands.submit, "examples/digits.yaml --name first --set collection.batch_size=32 --wait"),
    ("rerun", job_commands.rerun, "0f3a9c217b44 --set collection.batch_size=32"),
    ("watch", job_commands.watch, "0f3a9c217b44"),
    ("logs", job_commands.logs, "0f3a9c217b44 --follow"),
    ("results", job_commands.results, "0f3a9c217b44 --download files"),
    ("cancel", job_commands.cancel, "0f3a9c217b44"),
    ("jobs", job_commands.list_jobs, "--state failed --since 2d"),
    ("compare", compare_jobs, "0f3a9c217b44 8d21e07c5a19 --metric trace"),
):
    app.command(_name, epilog=epilog(f"kronoscope {_name} {_arguments}"))(_command)


@app.command(epilog=epilog("kronoscope menu --json"))
def menu(as_json: AsJson = False) -> None:
    """List the analyses that can be asked for."""
    if as_json:
        print_json(
            [{"kind": each.kind, "title": each.title, "description": each.description} for each in ANALYSES.values()]
        )
        return
    table = Table(pad_edge=False, show_edge=False)
    table.add_column("kind", no_wrap=True)
    table.add_column("results")
    for each in ANALYSES.values():
        table.add_row(each.kind, f"{each.title}. {each.description}")
    result_console().print(table)


@app.command(epilog=epilog("kronoscope serve --embedded --data-dir ~/kronoscope --allow-directory ~/models"))
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
    try:
        require_factories(allow_factory or (), importable=embedded)
    except FactoryWrong as error:
        fail(USAGE, [str(error)])
    if embedded:
        require_extra("api", "worker", command="kronoscope serve --embedded")
        raise typer.Exit(serve_embedded(data_dir, port, lambda text: message_console().print(text, soft_wrap=True)))
    if port is not None:
        os.environ["KRONOSCOPE_PORT"] = str(port)
    raise typer.Exit(exec_module("api.__main__", extra="api"))


app.command(epilog=epilog("kronoscope worker --until-idle --wall 4h"))(worker)
app.command(epilog=epilog("kronoscope autoscale --launcher slurm --classes classes.toml --dry-run"))(autoscale)
app.command(epilog=epilog("kronoscope devices --url http://127.0.0.1:8000"))(devices)


@app.command("import", epilog=epilog("kronoscope import digits"))
def import_run(folder: Path, url: Url = None) -> None:
    """Send the folder of a foreground run to the service, as a job that is marked as imported; prints its id."""
    read_run(folder)
    with Client(url) as client, display_for(message_console()) as display:
        write_line(client.import_run(folder, lambda sent, total: display.update("import", sent, total, "bytes")).id)


_EXPORTED = (*EXPORT_FILES, *TRACKERS)


@app.command(epilog=epilog("kronoscope export digits --to corda --without 'conv*' --output corda.pt"))
def export(
    source: JobOrFolder,
    to: Annotated[str, typer.Option(parser=one_of(_EXPORTED), help=f"One of {', '.join(_EXPORTED)}.")],
    target: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="The file; of kronfluence and mom2 a folder, or a file that ends in .zip; of mlflow a folder or a "
            "tracking URI, of wandb a folder.",
        ),
    ],
    without: Annotated[
        list[str] | None, typer.Option(help="A layer to leave out, by name; * stands for any characters. Repeatable.")
    ] = None,
    likelihood: Annotated[
        str | None,
        typer.Option(parser=one_of(("classification", "regression")), help="For laplace: that of the loss."),
    ] = None,
    outputs: Annotated[int | None, typer.Option(help="For laplace: the number of the model's outputs.")] = None,
    settings: Settings = None,
    url: Url = None,
) -> None:
    """Write the factors of a job, or of a folder, as a file that another tool reads, or the results for a tracker."""
    if to in TRACKERS:
        if without or likelihood or outputs or settings:
            fail(USAGE, [f"--to {to} writes results, and the other options are of factors; leave them out"])
        track(source, to, target, url)
        result_console().print(f"{to} in {target}", soft_wrap=True)
        return
    output = Path(target)
    options = {"format": to, "without": without or [], "likelihood": likelihood, "outputs": outputs}
    name = f"export/{EXPORT_FILES[to]}"  # type: ignore[index] # the parser takes no other words
    is_folder = Path(source).is_dir() or "/" in source
    unpacked = name.endswith(".zip") and output.suffix != ".zip"
    _require_place(output, unpacked=unpacked)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".part-") as folder:
            factors = {"path": str(Path(source).absolute())}
            if not is_folder:
                with Client(url) as client:
                    factors = {"job": client.full_id(source)}
            asked: dict[str, Any] = {"kind": EXPORT.kind, "factors": factors, EXPORT.kind: options}
            wanted: dict[str, Any] = change_document(asked, settings or (), "the export")
            own, kept = wanted.get(EXPORT.kind), ("kind", "factors")
            changed = any(wanted.get(each) != asked[each] for each in kept)
            if changed or not isinstance(own, dict) or own.get("format") != to:
                said = "--set changes `kind`, `factors` or `export.format`; give another source, or another --to"
                fail(USAGE, [said])
            made = _export_here(wanted, name, Path(folder)) if is_folder else _export_there(wanted, name, folder, url)
            _place(made, output, unpacked=unpacked)
    except OSError as error:
        fail(USAGE, [f"--output {output}: {error.strerror or error}; name a file in a folder that you may write"])
    result_console().print(f"{to} in {output}", soft_wrap=True)


def _export_here(wanted: dict[str, Any], name: str, folder: Path) -> Path:
    with display_for(message_console()) as display:
        outcome = run_job(_request(wanted, None, offline=True), folder / "run", display)
    _require_success(outcome)
    return folder / "run" / "artifacts" / name


def _export_there(wanted: dict[str, Any], name: str, folder: str, url: str | None) -> Path:
    with Client(url) as client:
        return job_commands.fetch(client, wanted, name, Path(folder))


@app.command(epilog=epilog("kronoscope reproduce digits --output digits-again"))
def reproduce(
    source: JobOrFolder,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Of a folder: the new run's; default: FOLDER-reproduced.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Of a folder: computing threads; default: those of the run.")
    ] = None,
    store: Store = None,
    offline: Offline = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the results of an earlier run there.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Compute a job again without its factors, and say where it differs (exit code 4 if it does)."""
    if not (Path(source).is_dir() or "/" in source):
        with Client(url) as client:
            name = client.full_id(source)
            found = job_commands.finish(client, client.rerun(name, {"reproduces": name}), silent=as_json)
    else:
        folder = Path(source).absolute()
        place = output or folder.with_name(f"{folder.name}-reproduced")
        document = {**(read_json(folder, "job.json").get("document") or {}), "reproduces": str(folder)}
        request = _request(document, store, offline=offline) | {"threads": threads, "replace": force}
        with display_for(message_console(), silent=as_json) as display:
            _require_success(run_job(request, place, display))
        found = read_run(place)[0]
    comparison = (found.manifest or {}).get("reproduction")
    if comparison is None:
        fail(FATAL, [f"the job that was reproduced is deleted or damaged; {found.job.id} has the new results"])
    if as_json:
        print_json({"job": found.job.id, **comparison})
    else:
        write_line("\n".join([*comparison["sentences"], f"the new results are those of {found.job.id}"]))
    if not comparison["equal"]:
        raise typer.Exit(FATAL)


@app.command("version", epilog=epilog("kronoscope version"))
def show_version() -> None:
    """Print the version; the same as `kronoscope --version`."""
    print_version(asked=True)


def _require_place(output: Path, *, unpacked: bool) -> None:
    """Refuse a place that the export cannot come to, before it is made."""
    if unpacked and output.exists() and (not output.is_dir() or any(output.iterdir())):
        fail(USAGE, [f"{output} exists and is not an empty folder; name another, or a file that ends in .zip"])
    if not unpacked and output.is_dir():
        fail(USAGE, [f"{output} is a folder; name a file in it"])


def _place(made: Path, output: Path, *, unpacked: bool) -> None:
    """Move an exported file to its place, the files of a zip into a folder."""
    if not unpacked:
        made.replace(output)
        return
    folder = made.with_suffix("")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder)
    if output.exists():
        output.rmdir()
    shutil.move(folder, output)


def _request(document: dict[str, Any], store: Path | None, *, offline: bool) -> dict[str, Any]:
    """Return the runner's request; every folder and factory may be named in the foreground."""
    return {
        "document": document,
        "paths": [str(Path.cwd())],
        "allowed": {"factories": ["*"], "directories": ["*"]},
        "store": str((store or _default_store()).absolute()),
        "offline": offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
    }


def _min_coverage(document: dict[str, Any]) -> float | None:
    """Return the share that a document asks for; the runner has refused one that is not a number."""
    collection = document.get("collection")
    return collection.get("min_coverage") if isinstance(collection, dict) else None


def _planned(
    document: dict[str, Any], store: Path | None, device: str | None, *, offline: bool, silent: bool
) -> Mapping[str, Any]:
    request = _request(document, store, offline=offline) | {"estimate": True, "device": device}
    with (
        tempfile.TemporaryDirectory(prefix="kronoscope-plan-") as folder,
        display_for(message_console(), silent=silent) as shown,
    ):
        outcome = run_job(request, Path(folder) / "plan", shown)
    _require_success(outcome)
    return outcome.plan


def _default_store() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kronoscope"


def _require_success(outcome: Outcome, *, verbose: bool = False) -> None:
    if (failure := outcome.failure) is not None:
        pointer = f"{failure.pointer} " if failure.pointer and "\n" not in failure.message else ""
        lines = [f"{pointer}{line}" for line in failure.message.split("\n")]
        # a caller's own code is shown whole on request, else by its calls alone
        whole = failure.category == "fatal" or (verbose and failure.trace)
        if whole and failure.detail:
            write_error(failure.detail)
        more = ["  (--verbose shows the whole traceback)"] if failure.trace and not whole else []
        fail(CATEGORIES[failure.category], [*lines, *trace_lines(failure.trace), *more])
    if outcome.stopped or outcome.interrupted:
        fail(STOPPED, ["the job was stopped; nothing runs on"])
    if not outcome.finished:
        said = [f"  {line}" for line in outcome.last_output[-15:]]
        fail(FATAL, ["the runner ended without a result; its last lines:", *said])


def _public(outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in plain(outcome.failure).items() if name not in ("frame", "detail")}


def main() -> None:
    """Run the program; its entry point."""
    outlast_reader()
    sys.exit(run_command(app))


if __name__ == "__main__":
    main()
