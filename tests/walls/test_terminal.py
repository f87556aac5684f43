"""Terminals are shown texts of others, and obey none of them."""

import io
import json

import pytest
from rich.text import Text

from kronoscope.cli import output
from kronoscope.cli.output import PrintableConsole, print_json, write_error, write_line
from kronoscope.display.printable import printable

ATTACKS = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\x1bP+q544e\x1b\\",
    "line\rgone",
    "back\x08\x08",
    "right\u202eto left",
    "none\u200b\u2066",
    "\ud800",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_exit_lets_a_sequence_through(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad = set(attack) - set("abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ[]0123456789;+\\")
    write_line(attack)
    write_error(attack)
    print_json({"name": attack})
    shown = capsys.readouterr()
    assert not bad & set(shown.out + shown.err) - {"\n"}
    # a program that reads the JSON gets what was written
    assert json.loads(shown.out.split("\n", 1)[1])["name"] == attack
    stream = io.StringIO()
    console = PrintableConsole(file=stream, force_terminal=True, color_system=None, width=200)
    console.print(attack, markup=False)
    console.print(Text(attack))
    assert not bad & set(stream.getvalue()) - {"\n"}


def test_styles_of_our_own_and_lines_stay() -> None:
    stream = io.StringIO()
    console = PrintableConsole(file=stream, force_terminal=True, color_system="standard", width=80)
    console.print(Text("bold", style="bold"))
    assert stream.getvalue() == "\x1b[1mbold\x1b[0m\n"
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("é ü 数 ━ …") == "é ü 数 ━ …"


def test_every_console_of_the_command_line_is_one() -> None:
    assert isinstance(output.result_console(), PrintableConsole)
    assert isinstance(output.message_console(), PrintableConsole)
