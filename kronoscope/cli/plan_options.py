"""Options of the command ``kronoscope plan``: the budget and the device that a job is planned for."""

from typing import Annotated, Literal

import typer

Budget = Annotated[
    str | None, typer.Option(help='Instead of the free memory here: "20GiB", of the device and of the host.')
]
Device = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(help="Plan for this kind of device, which need not be here; name its --budget."),
]
