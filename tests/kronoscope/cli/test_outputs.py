"""Outputs of the command line that are full, closed or lack a character, and an early ctrl-C: no traceback."""

import json
import subprocess
import sys

import pytest

from kronoscope.cli.exit_codes import run_command
from tests.kronoscope.conftest import KRONOSCOPE, environment


def shell(line: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of the shell, in which `$@` is the program."""
    command = ["sh", "-c", line, "sh", *KRONOSCOPE]
    return subprocess.run(command, env=environment(**more), capture_output=True, check=False, timeout=120)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("words", ["menu", "menu --json", "--version", "menu --help"])
def test_an_output_that_is_full_is_said(words: str) -> None:
    done = shell(f'"$@" {words} >/dev/full')
    assert done.returncode == 3
    assert done.stderr.decode() == "error: standard output takes no more (No space left on device); make room there\n"


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(
    ("closing", "code"), [(">&-", 0), (">&- 2>&-", 0), ("2>/dev/full", 0), ("nope 2>&-", 2), ("nope 2>/dev/full", 2)]
)
def test_outputs_that_nobody_reads_change_nothing(closing: str, code: int) -> None:
    done = shell(f'"$@" menu {closing}')
    assert done.returncode == code
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_an_output_lacks_are_replaced(encoding: str) -> None:
    """Tables have κ and boxes; JSON has the same value in any code."""
    shown = shell('"$@" menu', PYTHONIOENCODING=encoding)
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"?_max" in shown.stdout
    plain, narrow = (
        shell('"$@" menu --json', PYTHONIOENCODING="utf-8"),
        shell('"$@" menu --json', PYTHONIOENCODING=encoding),
    )
    assert json.loads(narrow.stdout.decode(encoding)) == json.loads(plain.stdout)
    assert "κ" in plain.stdout.decode()


def test_ctrl_c_while_modules_load_is_no_traceback() -> None:
    program = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "kronoscope.cli.documents":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
import kronoscope.cli
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")


def test_ctrl_c_before_a_command_begins_is_no_traceback() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert run_command(interrupted) == 130
