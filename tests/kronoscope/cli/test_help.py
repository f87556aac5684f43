"""Help texts, version and completion: each command has an example that its own parser takes."""

import shlex
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from kronoscope.cli.main import app


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words that name it."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


@pytest.mark.parametrize(("words", "command"), list(commands(typer.main.get_command(app))), ids=str)
def test_every_help_has_an_example_that_works(words: tuple[str, ...], command: Any) -> None:
    help_text = " ".join(CliRunner().invoke(app, [*words, "--help"]).output.split())
    example = command.epilog.partition("Example: `")[2].partition("`")[0]
    assert f"Example: `{example}`" in help_text
    assert "Exit codes: 0 done" in help_text
    program, *arguments = shlex.split(example)
    assert program == "kronoscope"
    assert tuple(arguments[: len(words)]) == words
    root: Any = typer.main.get_command(app)
    while getattr(root, "commands", None):
        root = root.commands[arguments.pop(0)]
    root.make_context("kronoscope", arguments)  # unknown options and wrong values are refused here


def test_the_version_is_an_option_and_a_command() -> None:
    for word in ("--version", "version"):
        shown = CliRunner().invoke(app, [word])
        assert shown.exit_code == 0
        assert shown.output == f"kronoscope {version('kronoscope')}\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("kronoscope wat", "watch"), ("kronoscope jobs --state can", "cancelling"), ("kronoscope plan --dev", "--device"),
     ("kronoscope plan --device cu", "cuda"), ("kronoscope keys create --scope su", "submit")],
)  # fmt: skip
def test_the_shell_completes_commands_options_and_values(typed: str, offered: str) -> None:
    environment = {"_KRONOSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    shown = CliRunner().invoke(app, [], env=environment, prog_name="kronoscope")
    assert offered in shown.output.split()


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (("plan", "job.yaml", "--device", "cup"), "cpu"),
        (("keys", "create", "--tenant", "lab", "--scope", "raed"), "read"),
        (("sumbit",), "submit"),
        (("menu", "--jsn"), "--json"),
    ],
)
def test_a_misspelled_word_is_answered_with_the_nearest(words: tuple[str, ...], nearest: str) -> None:
    refused = CliRunner().invoke(app, list(words))
    assert refused.exit_code == 2
    said = " ".join(refused.output.replace("│", " ").split())
    assert any(f"{hint}{nearest}" in said for hint in ("did you mean `", "Did you mean '", "options: "))
