"""The command ``kronoscope compare``: the numbers of several jobs, or runs, beside each other."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from catalog import ANALYSES
from catalog.record import plain
from catalog.responses.comparison import MOST_JOBS, ComparisonView, compare
from kronoscope.cli.exit_codes import USAGE, fail
from kronoscope.cli.options import AsJson, Url
from kronoscope.cli.output import print_json, result_console
from kronoscope.cli.run_folder import read_run
from kronoscope.client.client import Client
from kronoscope.display.numbers import format_number
from kronoscope.display.printable import printable


def compare_jobs(
    jobs: Annotated[list[str], typer.Argument(metavar="ID|FOLDER", help="2 to 8 jobs; the first is the reference.")],
    metric: Annotated[
        str | None, typer.Option(help="A number, such as trace; default: one of the layer table.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="Only this analysis.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Compare jobs, or folders of runs, by their stored numbers: differences and ratios by layer."""
    if not 2 <= len(jobs) <= MOST_JOBS:
        fail(USAGE, [f"{len(jobs)} jobs are given; name 2 to {MOST_JOBS}, the reference first"])
    found, rows = [], []
    with Client(url) as client:
        for each in jobs:
            if Path(each).is_dir() or "/" in each:  # no id has a slash
                results, of_job = read_run(Path(each))
            else:
                results = client.results(client.full_id(each))
                of_job = list(client.layers(results.job.id))
            found.append((results.job, results.summary))
            rows.append(of_job)
    view = compare(found, rows, kind, metric)
    print_json(plain(view)) if as_json else _show(view)


def _show(view: ComparisonView) -> None:
    """Print one number of all layers as a table, then what differs beside it."""
    tables = [(each.layer, each.metrics) for each in view.layers]
    tables += [(f"whole model, {kind}", metrics) for kind, metrics in view.model.items()]
    names = list(dict.fromkeys(name for _, metrics in tables for name in metrics))
    if not names:
        fail(USAGE, ["the jobs have no such number (yet); `--json`, without --metric and --kind, lists what they have"])
    listed = [path for each in ANALYSES.values() for column in each.columns for path in str(column.value).split("|")]
    shown = next((path for path in (each.removeprefix("metrics.") for each in listed) if path in names), names[0])
    table = Table("layer", title=Text(shown), title_justify="left", pad_edge=False, show_edge=False)
    titles = [printable(job.name or job.id[-12:], lines=False) for job in view.jobs]
    for heading in [titles[0], *(each for title in titles[1:] for each in (title, "difference", "ratio"))]:
        table.add_column(Text(heading), justify="right", overflow="fold")
    for name, metrics in ((name, metrics[shown]) for name, metrics in tables if shown in metrics):
        triples = zip(metrics.values, metrics.differences, metrics.ratios, strict=True)
        cells = [Text(format_number(each)) for triple in triples for each in triple]
        table.add_row(Text(printable(name, lines=False)), cells[0], *cells[3:])
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
