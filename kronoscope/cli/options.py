"""Arguments and options that several commands take, and the end of every command's help."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from catalog.field_errors import suggestion

CODES = (
    "Exit codes: 0 done · 1 fault of this program · 2 wrong input or use · 3 service or machine cannot do it now · "
    "4 an operator must look into it · 5 stopped or cancelled · 6 done in part: an analysis was refused, or only a "
    "part of the model was measured."
)
"""The last paragraph of every command's help, on one line: the terminal breaks it."""


def epilog(example: str) -> str:
    """Return the end of a command's help."""
    return f"Example: `{example}`\n\n{CODES}"


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of an option with few values."""

    def parse(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"must be one of {', '.join(choices)} (got '{text}'){suggestion(text, choices)}")
        return text

    return parse


def read_name(text: str) -> str:
    """Return the id, name or path that is given; an empty one is that of a shell's variable that is not set."""
    if not text:
        raise typer.BadParameter("must not be empty (got ''); a variable of the shell may not be set")
    return text


def read_path(text: str | Path) -> Path:
    """Return the path that is given; an empty one would be the current folder, and one that is too long none."""
    if not str(text):
        raise typer.BadParameter("must be a path (got ''); name a folder, or `.` for the current one")
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise typer.BadParameter(
                f"must be a path (got '{str(text)[:80]}'): {error.strerror}; name another"
            ) from error
    return Path(text)


def read_folder(text: str) -> Path:
    """Return the folder that an option names, which need not be there yet; a file is none."""
    path = read_path(text)
    there = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        raise typer.BadParameter(f"must be a folder (got '{text}'): {there.name} is a file; name another, or a new one")
    return path


def complete(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the completion of an option with few values."""
    return lambda incomplete: [each for each in choices if each.startswith(incomplete)]


_DEVICES = ("cpu", "cuda")
Document = Annotated[Path, typer.Argument(metavar="JOB", help="Job document: YAML, or JSON where it ends in .json.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set one field, e.g. collection.batch_size=32.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines, and no progress.")]
Url = Annotated[str | None, typer.Option("--url", help="The service; default KRONOSCOPE_URL or http://127.0.0.1:8000.")]
Store = Annotated[
    Path | None, typer.Option(metavar="<path>", parser=read_folder, help="Folder of fetched and trained models.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing from the hub.")]
JobId = Annotated[str, typer.Argument(metavar="ID", parser=read_name, help="The job's id.")]
JobOrFolder = Annotated[
    str,
    typer.Argument(metavar="ID|FOLDER", parser=read_name, help="The job's id, or the folder of a `kronoscope run`."),
]
Upload = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="<path>", parser=read_path, help="Send a model's folder, or a file of data, and measure that."
    ),
]
Download = Annotated[
    Path | None, typer.Option(metavar="<path>", parser=read_folder, help="Folder to download the job's files into.")
]
Parent = Annotated[
    str | None,
    typer.Option(metavar="ID", parser=read_name, help="The pieces of this divided job, in place of whole jobs."),
]
Budget = Annotated[
    str | None, typer.Option(help='Instead of the free memory here: "20GiB", of the device and of the host.')
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="cpu|cuda",
        parser=one_of(_DEVICES),
        autocompletion=complete(_DEVICES),
        help="Plan for this kind of device, which need not be here; name its --budget.",
    ),
]
