"""The command ``kronoscope keys``: make, revoke and list API keys in the service's database."""

from typing import Annotated

import typer

from kronoscope.cli.options import complete, epilog, one_of
from kronoscope.cli.serve import exec_module

_SCOPES = ("read", "submit", "admin")

keys = typer.Typer(
    help="API keys of the service's database.",
    no_args_is_help=True,
    epilog=epilog("kronoscope keys create --tenant lab --scope read --expires 2030-01-01T00:00:00Z"),
)


@keys.command(
    "create", epilog=epilog("kronoscope keys create --tenant lab --scope read --expires 2030-01-01T00:00:00Z")
)
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List API keys by their public part, with scopes, expiry, and the last use to the minute."""
    arguments = ["list", *([] if tenant is None else ["--tenant", tenant]), *(["--json"] if as_json else [])]
    raise typer.Exit(exec_module("jobs.tenancy.api_keys", arguments))
