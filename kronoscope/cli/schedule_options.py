"""Options of the command line for a job's schedule: they replace values of the document's block `schedule`."""

from typing import Annotated, Any

import typer

from kronoscope.cli.documents import DocumentUnreadable

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
