"""The command ``kronoscope devices``: what the service's workers compute on, and what is free there."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from catalog.record import plain
from catalog.responses import DeviceView
from kronoscope.client.client import Client
from kronoscope.display.tables import shortened

_STYLES = {"free": "green", "leased": "cyan", "reserved": "cyan", "draining": "yellow", "stale": "red"}


def devices(
    url: Annotated[
        str | None, typer.Option("--url", help="The service; default KRONOSCOPE_URL or http://127.0.0.1:8000.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List the devices that the service's workers compute on."""
    with Client(url) as client:
        found = list(client.devices())
    if as_json:
        sys.stdout.write(json.dumps([plain(each) for each in found], indent=2, ensure_ascii=False) + "\n")
        return
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=100)
    if found:
        console.print(device_table(found))
    else:
        console.print("no worker has offered a device yet; `kronoscope worker` starts one")


def device_table(found: Sequence[DeviceView]) -> Table:
    """One row per device: its size, what is free for the next job, what jobs and others hold."""
    table = Table(pad_edge=False, show_edge=False, caption="sizes in GiB", caption_justify="left")
    for name in ("node", "device", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("size", "free", "jobs", "others"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("uuid", no_wrap=True)
    for each in found:
        # a device with a job is shown with that, though another may wait for it already
        state = "reserved" if each.reserved and each.state == "free" else each.state
        sizes = (each.capacity_bytes, each.free_bytes, each.leased_bytes, each.foreign_bytes)
        names = (shortened(each.node, 16), shortened(each.name, 20))
        table.add_row(
            *map(Text, names),
            Text(state, style=_STYLES.get(state, "")),
            *(f"{size / 2**30:,.1f}" if size else "–" for size in sizes),
            Text(shortened(each.uuid, 16)),
        )
    return table
