"""The command ``kronoscope tenants``: bytes and quotas of tenants in the service's database."""

from typing import Annotated

import typer

from kronoscope.cli.options import epilog
from kronoscope.cli.serve import exec_module

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
