"""The command ``kronoscope devices``: the devices of the service's workers, with their free memory."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from catalog.record import plain
from catalog.responses.device_views import DeviceView
from kronoscope.cli.output import print_json, result_console
from kronoscope.client.client import Client
from kronoscope.display.layer_names import shorten, shorten_all

_STYLES = {"free": "green", "leased": "cyan", "reserved": "cyan", "draining": "yellow", "stale": "red"}


def devices(
    url: Annotated[
        str | None, typer.Option("--url", help="The service; default KRONOSCOPE_URL or http://127.0.0.1:8000.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List the devices that the service's workers compute on."""
    with Client(url) as client:
        listed = list(client.devices())
    if as_json:
        print_json([plain(each) for each in listed])
        return
    console = result_console()
    if listed:
        console.print(device_table(listed))
    else:
        console.print("no worker has registered a device yet; start one with `kronoscope worker`")


def device_table(devices: Sequence[DeviceView]) -> Table:
    """Tabulate devices, one row each."""
    table = Table(pad_edge=False, show_edge=False, caption="sizes in GiB", caption_justify="left")
    for name in ("node", "device", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("size", "free", "jobs", "others"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("uuid", no_wrap=True)
    nodes = shorten_all([each.node for each in devices], 16)
    identifiers = shorten_all([each.uuid for each in devices], 16)
    for each, node, identifier in zip(devices, nodes, identifiers, strict=True):
        # a device with a job is shown with that, though another may wait for it already
        state = "reserved" if each.reserved and each.state == "free" else each.state
        sizes = (each.capacity_bytes, each.free_bytes, each.leased_bytes, each.foreign_bytes)
        names = (node, shorten(each.name, 20))
        table.add_row(
            *map(Text, names),
            Text(state, style=_STYLES.get(state, "")),
            *(f"{size / 2**30:,.1f}" if size else "–" for size in sizes),
            Text(identifier),
        )
    return table
