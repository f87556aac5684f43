"""Options of the command ``kronoscope plan``: the budget and the device that a job is planned for."""

from typing import Annotated

import typer

from kronoscope.cli.options import complete, one_of

_DEVICES = ("cpu", "cuda")

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
