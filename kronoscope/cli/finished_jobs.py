"""Finished jobs in other hands: what a run or a job has left, imported, exported, computed again, and compared."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from catalog import ANALYSES
from catalog.analyses.export import EXPORT, EXPORT_FILES
from catalog.frames import Failed
from catalog.record import plain
from catalog.responses.comparison import MOST_JOBS, ComparedMetric, ComparisonView, compare
from catalog.responses.views import FailureView, JobView, ResultsView
from kronoscope.cli.documents import change_document
from kronoscope.cli.exit_codes import FATAL, INTERNAL, USAGE, end_as, fail
from kronoscope.cli.job_source import find_job, is_folder
from kronoscope.cli.options import AsJson, JobOrFolder, Offline, Settings, Store, Url, one_of, read_name, read_path
from kronoscope.cli.output import message_console, print_json, result_console, write_line
from kronoscope.cli.run_folder import read_json, read_run
from kronoscope.cli.run_job import require_success, run_job, run_request
from kronoscope.cli.trackers import TRACKERS, track
from kronoscope.client.client import Client
from kronoscope.display.numbers import format_number
from kronoscope.display.printable import printable
from kronoscope.display.progress import display_for
from kronoscope.display.results import show_progress


def import_run(folder: Annotated[Path, typer.Argument(metavar="FOLDER", parser=read_path)], url: Url = None) -> None:
    """Send the folder of a foreground run to the service, as a job that is marked as imported; prints its id."""
    read_run(folder)
    with Client(url) as client, display_for(message_console()) as display:
        write_line(client.import_run(folder, lambda sent, total: display.update("import", sent, total, "bytes")).id)


_EXPORTED = (*EXPORT_FILES, *TRACKERS)
_FOLDER = ".part-export-"
_Failure = TypeVar("_Failure", Failed, FailureView)


def export(
    source: JobOrFolder,
    to: Annotated[str, typer.Option(parser=one_of(_EXPORTED), help=f"One of {', '.join(_EXPORTED)}.")],
    target: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            parser=read_name,
            metavar="<str>",
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
        return
    output = Path(target)
    options = {"format": to, "without": without or [], "likelihood": likelihood, "outputs": outputs}
    name = f"export/{EXPORT_FILES[to]}"  # type: ignore[index] # the parser takes no other words
    here = is_folder(source)
    unpacked = name.endswith(".zip") and output.suffix != ".zip"
    try:
        _require_place(output, unpacked=unpacked)
        output.parent.mkdir(parents=True, exist_ok=True)
        with _folder_beside(output) as folder:
            factors = {"path": str(Path(source).absolute())}
            if not here:
                with Client(url) as client:
                    factors = {"job": find_job(client, source)}
            asked: dict[str, Any] = {"kind": EXPORT.kind, "factors": factors, EXPORT.kind: options}
            wanted: dict[str, Any] = change_document(asked, settings or (), "the export")
            own, kept = wanted.get(EXPORT.kind), ("kind", "factors")
            changed = any(wanted.get(each) != asked[each] for each in kept)
            if changed or not isinstance(own, dict) or own.get("format") != to:
                said = "--set changes `kind`, `factors` or `export.format`; give another source, or another --to"
                fail(USAGE, [said])
            made = _export_here(wanted, name, folder) if here else _fetch(url, wanted, name, folder)
            _place(made, output, unpacked=unpacked)
    except OSError as error:
        fail(USAGE, [f"--output {output}: {error.strerror or error}; name a file in a folder that you may write"])
    result_console().print(f"{to} in {output}", soft_wrap=True)


@contextlib.contextmanager
def _folder_beside(output: Path) -> Iterator[Path]:
    """Make a folder beside the output for as long as it is filled; those of exports that were killed go."""
    for left in output.parent.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=_FOLDER) as made, contextlib.ExitStack() as held:
        # a file system that keeps no locks keeps what was killed
        with contextlib.suppress(OSError):
            held.enter_context(_locked(Path(made)))
        yield Path(made)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; ``OSError`` if a process that lives has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _in_options(failure: _Failure) -> _Failure:
    """Return a failure that names the command's options in the place of the fields of the export's document."""

    def options(listed: re.Match[str]) -> str:
        return " ".join(f"--without {name}" for name in listed[1].split(", "))

    said = re.sub(r"export\.without: \[(.*?)\]", options, failure.message)
    said = re.sub(r"`(?:export\.)?(without|likelihood|outputs)`", r"`--\1`", said)
    return replace(failure, message=said, pointer=failure.pointer and failure.pointer.replace("/export/", "--"))


def _export_here(wanted: dict[str, Any], name: str, folder: Path) -> Path:
    with display_for(message_console()) as display:
        outcome = run_job(run_request(wanted, None, offline=True), folder / "run", display)
    outcome.failure = outcome.failure and _in_options(outcome.failure)
    require_success(outcome)
    return folder / "run" / "artifacts" / name


def reproduce(
    source: JobOrFolder,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="<path>",
            parser=read_path,
            help="Of a folder: the new run's; default: FOLDER-reproduced.",
        ),
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
    if not is_folder(source):
        with Client(url) as client:
            name = find_job(client, source)
            found = _finish(client, client.rerun(name, {"reproduces": name}), silent=as_json)
    else:
        folder = Path(source).absolute()
        place = output or folder.with_name(f"{folder.name}-reproduced")
        read_run(folder)  # a damaged one is refused before anything is computed
        document = {**read_json(folder, "job.json")["document"], "reproduces": str(folder)}
        request = run_request(document, store, offline=offline) | {"threads": threads, "replace": force}
        with display_for(message_console(), silent=as_json) as display:
            require_success(run_job(request, place, display))
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


def _fetch(url: str | None, document: dict[str, Any], name: str, folder: Path) -> Path:
    """Submit a job, follow it to its end and download one of its files; end the command where the job ends badly."""
    with Client(url) as client:
        results = _finish(client, client.submit(document), said=_in_options)
        artifact = next((each for each in results.artifacts if each.name == name), None)
        if artifact is None:
            fail(INTERNAL, [f"job {results.job.id} has left no {name}"])
        return client.download(results.job.id, artifact, folder)


def _finish(
    client: Client,
    submitted: JobView,
    *,
    silent: bool = False,
    said: Callable[[FailureView], FailureView] = lambda failure: failure,
) -> ResultsView:
    """Follow a job to its end and return its results; end the command where the job ends badly, as it is ``said``."""
    with display_for(message_console(), silent=silent) as display:
        for job in client.follow(submitted.id):
            show_progress(job, display)
            if job.ended and job.state != "succeeded":
                end_as(replace(job, failure=job.failure and said(job.failure)))
    return client.results(submitted.id)


def compare_jobs(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="ID|FOLDER", parser=read_name, help="2 to 8 jobs; the first is the reference."),
    ],
    metric: Annotated[
        str | None, typer.Option(help="A number, such as trace; default: one of the layer table.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="<str>", parser=one_of((*ANALYSES,)), help="Only this analysis.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Compare jobs, or folders of runs, by their stored numbers: differences and ratios by layer."""
    if not 2 <= len(jobs) <= MOST_JOBS:
        fail(USAGE, [f"{len(jobs)} jobs are given; name 2 to {MOST_JOBS}, the reference first"])
    found, rows = [], []
    with Client(url) as client:
        for each in jobs:
            if is_folder(each):
                results, of_job = read_run(Path(each))
            else:
                results = client.results(find_job(client, each))
                of_job = list(client.layers(results.job.id))
            found.append((results.job, results.summary))
            rows.append(of_job)
    view = compare(found, rows, kind, metric)
    print_json(plain(view)) if as_json else _show(view)


def _show(view: ComparisonView) -> None:
    """Print one number of all layers as a table, then what differs beside it."""
    measured = [*(each.metrics for each in view.layers), *view.model.values()]
    names = list(dict.fromkeys(name for metrics in measured for name in metrics))
    if not names:
        fail(USAGE, ["the jobs have no such number (yet); `--json`, without --metric and --kind, lists what they have"])
    listed = [path for each in ANALYSES.values() for column in each.columns for path in str(column.value).split("|")]
    shown = next((path for path in (each.removeprefix("metrics.") for each in listed) if path in names), names[0])
    table = Table("layer", title=Text(shown), title_justify="left", pad_edge=False, show_edge=False)
    titles = [printable(job.name or job.id[-12:], lines=False) for job in view.jobs]
    rows = _rows(view, shown)
    several = len({kind for kinds in rows.values() for kind in kinds}) > 1
    if several:
        table.add_column("analysis", overflow="fold")
    for heading in [titles[0], *(each for title in titles[1:] for each in (title, "difference", "ratio"))]:
        table.add_column(Text(heading), justify="right", overflow="fold")
    for (name, _, metric), kinds in rows.items():
        triples = zip(metric.values, metric.differences, metric.ratios, strict=True)
        cells = [Text(format_number(each)) for triple in triples for each in triple]
        whose = [Text(", ".join(kinds))] if several else []
        table.add_row(Text(printable(name, lines=False)), *whose, cells[0], *cells[3:])
    console = result_console()
    console.print(table)
    lines = [
        f"in {title} and not in all: {', '.join(job.only)}"
        for title, job in zip(titles, view.jobs, strict=True)
        if job.only
    ]
    lines += [f"{field}: {' | '.join(each or '–' for each in values)}" for field, values in view.documents.items()]
    for line in [*lines, *([f"--metric shows {', '.join(names)}"] if names[1:] else [])]:
        console.print(printable(line, lines=False), markup=False, soft_wrap=True)


def _rows(view: ComparisonView, shown: str) -> dict[tuple[str, tuple[int | None, ...], ComparedMetric], list[str]]:
    """Return the analyses that have a number by layer, places and value: those of one measurement share its row."""
    rows: dict[tuple[str, tuple[int | None, ...], ComparedMetric], list[str]] = {}
    for each in view.layers:
        if shown in each.metrics:
            rows.setdefault((each.layer, each.ordinals, each.metrics[shown]), []).append(each.kind)
    for kind, metrics in view.model.items():
        if shown in metrics:
            rows.setdefault(("whole model", (), metrics[shown]), []).append(kind)
    return rows
