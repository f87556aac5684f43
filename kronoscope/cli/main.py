"""The main command, ``kronoscope``; ``kronoscope.cli.exit_codes`` lists its exit codes."""

import os
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from catalog import ANALYSES
from catalog.record import plain
from catalog.responses.coverage import assess_coverage
from kronoscope.cli import job_commands
from kronoscope.cli.documents import read_document
from kronoscope.cli.exit_codes import USAGE, fail, require_whole, run_command
from kronoscope.cli.extras import require_extra
from kronoscope.cli.finished_jobs import compare_jobs, export, import_run, reproduce
from kronoscope.cli.options import (
    AsJson,
    Budget,
    Device,
    Document,
    Offline,
    Settings,
    Store,
    epilog,
    read_folder,
    read_path,
)
from kronoscope.cli.output import message_console, outlast_readers, print_json, result_console
from kronoscope.cli.run_job import require_success, run_job, run_request
from kronoscope.cli.serve import FactoryWrong, exec_module, require_factories, serve_embedded
from kronoscope.cli.service_commands import autoscale, devices, keys, tenants, worker
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
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="<path>",
            parser=read_path,
            help="Folder for job.json, results.json, log.jsonl, artifacts/.",
        ),
    ],
    settings: Settings = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Computing threads; default: what is fastest here, as measured.")
    ] = None,
    store: Store = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="<path>",
            parser=read_folder,
            help="Folder of factors that runs of the same collection share; default: none.",
        ),
    ] = None,
    offline: Offline = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the results of an earlier run there.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every line of the job's log.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a job here, in the foreground, without any service."""
    wanted = read_document(document, settings or ())
    request = run_request(wanted, store, offline=offline) | {
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
        said = {} if outcome.failure is None else plain(outcome.failure)
        failure = {name: value for name, value in said.items() if name not in ("frame", "detail")}
        print_json({"output": str(output), "finished": outcome.finished, "summary": outcome.summary,
                    "coverage": plain(measured), "refused": plain(outcome.refused),
                     "failure": failure or None})  # fmt: skip
    require_success(outcome, verbose=verbose)
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
    data_dir: Annotated[
        Path,
        typer.Option(metavar="<path>", parser=read_path, help="Folder of ledger, artifacts, models and logs."),
    ] = Path(".kronoscope"),
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
app.command("import", epilog=epilog("kronoscope import digits"))(import_run)
app.command(epilog=epilog("kronoscope export digits --to corda --without 'conv*' --output corda.pt"))(export)
app.command(epilog=epilog("kronoscope reproduce digits --output digits-again"))(reproduce)


@app.command("version", epilog=epilog("kronoscope version"))
def show_version() -> None:
    """Print the version; the same as `kronoscope --version`."""
    print_version(asked=True)


def _min_coverage(document: dict[str, Any]) -> float | None:
    """Return the share that a document asks for; the runner has refused one that is not a number."""
    collection = document.get("collection")
    return collection.get("min_coverage") if isinstance(collection, dict) else None


def _planned(
    document: dict[str, Any], store: Path | None, device: str | None, *, offline: bool, silent: bool
) -> Mapping[str, Any]:
    request = run_request(document, store, offline=offline) | {"estimate": True, "device": device}
    with (
        tempfile.TemporaryDirectory(prefix="kronoscope-plan-") as folder,
        display_for(message_console(), silent=silent) as shown,
    ):
        outcome = run_job(request, Path(folder) / "plan", shown)
    require_success(outcome)
    return outcome.plan


def main() -> None:
    """Run the program; its entry point."""
    outlast_readers()
    sys.exit(run_command(app))


if __name__ == "__main__":
    main()
