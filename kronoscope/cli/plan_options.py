"""Options of the command ``kronoscope plan``: what the job is planned for."""

from typing import Annotated, Literal

import typer

Budget = Annotated[
    str | None, typer.Option(help='Instead of what is free here: "20GiB", of the device and of the host.')
]
Device = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(help="Plan for this kind of device, which need not be here; name its --budget."),
]
