"""Service commands: its keys, tenants and devices, and the programs that become its workers or start them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from catalog.record import plain
from catalog.responses.device_views import DeviceView
from kronoscope.cli.options import Url, complete, epilog, one_of, read_path
from kronoscope.cli.output import print_json, result_console
from kronoscope.cli.serve import exec_module
from kronoscope.client.client import Client
from kronoscope.display.layer_names import shorten, shorten_all

_CREATE = epilog("kronoscope keys create --tenant lab --scope read --expires 2030-01-01T00:00:00Z")
_SCOPES = ("read", "submit", "admin")
_LAUNCHERS = ("slurm", "kubernetes", "command")
_STYLES = {"free": "green", "leased": "cyan", "reserved": "cyan", "draining": "yellow", "stale": "red"}
_Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

keys = typer.Typer(help="API keys of the service's database.", no_args_is_help=True, epilog=_CREATE)


@keys.command("create", epilog=_CREATE)
def create_key(
    tenant: Annotated[str, typer.Option(help="The tenant of the key; made where there is none of that name.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCOPE",
            parser=one_of(_SCOPES),
            autocompletion=complete(_SCOPES),
            help="read, submit or admin; default: read and submit.",
        ),
    ] = None,
    expires: Annotated[str | None, typer.Option(help="Its expiry, e.g. 2030-01-01T00:00:00Z.")] = None,
) -> None:
    """Make an API key in the database that KRONOSCOPE_DATABASE_URL names; it is shown once."""
    arguments = ["create", "--tenant", tenant]
    for each in scope or ():
        arguments += ["--scope", each]
    if expires is not None:
        arguments += ["--expires", expires]
    raise typer.Exit(exec_module("jobs.tenancy.api_keys", arguments))


@keys.command("revoke", epilog=epilog("kronoscope keys revoke 7k2mq4xa"))
def revoke_key(key: Annotated[str, typer.Argument(help="The key, or its prefix.")]) -> None:
    """Revoke an API key."""
    raise typer.Exit(exec_module("jobs.tenancy.api_keys", ["revoke", key]))


@keys.command("list", epilog=epilog("kronoscope keys list --tenant lab --json"))
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="One tenant; default: all.")] = None,
    as_json: _Json = False,
) -> None:
    """List API keys by their public part, with scopes, expiry, and the last use to the minute."""
    arguments = ["list", *([] if tenant is None else ["--tenant", tenant]), *(["--json"] if as_json else [])]
    raise typer.Exit(exec_module("jobs.tenancy.api_keys", arguments))


tenants = typer.Typer(
    help="Tenants of the service's database.", no_args_is_help=True, epilog=epilog("kronoscope tenants show lab")
)


@tenants.command("show", epilog=epilog("kronoscope tenants show lab"))
def show_tenants(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One tenant; default: all.")] = None,
) -> None:
    """Show the bytes that the files of each tenant take, and its quota."""
    raise typer.Exit(exec_module("jobs.tenancy.tenants", ["show", *([] if name is None else [name])]))


@tenants.command("set", epilog=epilog("kronoscope tenants set lab --bytes 50GB"))
def set_tenant(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")],
    quota: Annotated[
        str,
        typer.Option("--bytes", metavar="50GB", help="Its quota in bytes, MB, GiB …; or `none`."),
    ],
) -> None:
    """Set the quota of a tenant's files."""
    limit = ["--no-bytes"] if quota == "none" else ["--bytes", quota]
    raise typer.Exit(exec_module("jobs.tenancy.tenants", ["set", name, *limit]))


def worker(
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End once nothing is queued that it could take, and nothing runs here.")
    ] = False,
    wall: Annotated[
        str | None,
        typer.Option(metavar="4h", help="When its machine is taken away, from now on; Slurm says it itself."),
    ] = None,
    drain_before: Annotated[
        str | None, typer.Option(metavar="10m", help="How long before that its jobs are handed back and it has ended.")
    ] = None,
) -> None:
    """Run a worker of the service, with its KRONOSCOPE_* settings: wake-ups come from Redis."""
    options = {
        "KRONOSCOPE_UNTIL_IDLE": "1" if until_idle else None,
        "KRONOSCOPE_WALL": wall,
        "KRONOSCOPE_DRAIN_BEFORE": drain_before,
    }
    os.environ.update({name: value for name, value in options.items() if value is not None})  # Celery reads the command
    raise typer.Exit(exec_module("celery", ["-A", "worker.app", "worker", "-P", "threads"], extra="worker"))


def autoscale(
    launcher: Annotated[
        str,
        typer.Option(
            metavar="LAUNCHER",
            parser=one_of(_LAUNCHERS),
            autocompletion=complete(_LAUNCHERS),
            help="What lends the machines: slurm, kubernetes or command.",
        ),
    ],
    classes: Annotated[
        Path,
        typer.Option(metavar="<path>", parser=read_path, help="TOML file of machine classes, each with its template."),
    ],
    once: Annotated[bool, typer.Option("--once", help="One round, for cron.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started and why, and start nothing.")
    ] = False,
    every: Annotated[str, typer.Option(metavar="30s", help="Time between two rounds.")] = "30s",
) -> None:
    """Start workers for the jobs that wait in the service's database, and let them leave when nothing is left to do."""
    flags = [*(["--once"] if once else []), *(["--dry-run"] if dry_run else [])]
    words = ["--launcher", launcher, "--classes", str(classes), "--every", every, *flags]
    raise typer.Exit(exec_module("jobs.autoscale.__main__", words))


def devices(url: Url = None, as_json: _Json = False) -> None:
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
