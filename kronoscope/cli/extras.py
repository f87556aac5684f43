"""Extras of the installation: what a command needs beside the client, and the sentence that says what to install."""

import importlib.util

_EXTRAS = {"api": "fastapi", "ledger": "sqlalchemy", "worker": "transformers", "mlflow": "mlflow", "wandb": "wandb"}
"""Each extra by a package that it alone brings."""


class NotInstalled(RuntimeError):
    """An installation without the packages that a command needs."""


def require_extra(*extras: str, command: str) -> None:
    """Raise ``NotInstalled``, with the line that installs what is lacking, where a command's packages are missing."""
    lacking = [each for each in extras if importlib.util.find_spec(_EXTRAS[each]) is None]
    if lacking:
        raise NotInstalled(
            f"`{command}` needs what this installation lacks; "
            f'install it by: pip install "kronoscope[{",".join(lacking)}]"'
        )
