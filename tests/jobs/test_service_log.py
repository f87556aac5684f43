"""A line of a log is one JSON object, whatever stands in it and however it was logged."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.service_log import configure_logging, one_line

HOSTILE = [
    "two\nlines\r\nand\x0b\x0c\x1c\x1d\x1emore",
    "\x1b[31mred\x1b]0;title\x07\x9b2J\x08\x7f",
    "next\x85line\u2028separator\u2029paragraph",
    "\u202egnp.exe\u202c \u2066\u200b\ufeff",
    "lone \ud800 surrogate",
    '"}\n{"event": "forged", "level": "critical"}',
    "λ_A=1e-3 κ_G=5 ümlaut 漢字",
    "%s %d %(x)s {0} {x}",
    "\0",
]


class Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("canary")


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What was logged, each line parsed strictly; bytes as they would reach a file."""
    raw = io.BytesIO()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    configure_logging("DEBUG", io.TextIOWrapper(raw, encoding="utf-8", write_through=True))

    def parsed() -> list[dict[str, Any]]:
        text = raw.getvalue().decode()
        assert all(character == "\n" or character.isprintable() for character in text), text
        return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]

    yield parsed
    logging.captureWarnings(capture=False)
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def test_addresses_that_are_asked_are_in_no_line(lines: Callable[[], list[dict[str, Any]]]) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(204))
    with httpx.Client(transport=transport) as client:
        client.post("https://example.com/hooks?token=canary")
    assert "canary" not in json.dumps(lines())


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_names_stay_in_their_line(lines: Callable[[], list[dict[str, Any]]], text: str) -> None:
    # without pytest's own handlers: a report with a lone surrogate cannot go from one test process to another
    logging.getLogger().handlers = logging.getLogger().handlers[:1]
    structlog.get_logger("ours").bind(layer=text).info(text, **{text: [text]})
    logging.getLogger("theirs").warning("told %s", text, extra={"layer": text})
    ours, theirs = lines()
    assert (ours["event"], ours["layer"], ours[text]) == (text, text, [text])
    assert (theirs["event"], theirs["layer"], theirs["level"]) == (f"told {text}", text, "warning")


def test_a_traceback_is_one_line_too(lines: Callable[[], list[dict[str, Any]]]) -> None:
    try:
        int(HOSTILE[1])
    except ValueError:
        logging.getLogger("theirs").exception("failed")
        structlog.get_logger("ours").exception("failed")
    for line in lines():
        assert "Traceback" in line["exception"]
        assert "[31mred" in line["exception"]


def test_values_that_json_has_not_are_said(lines: Callable[[], list[dict[str, Any]]]) -> None:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    odd = {
        "nan": float("nan"),
        "inf": -float("inf"),
        "set": {1},
        "bytes": b"\xff",
        "circle": circle,
    }
    structlog.get_logger("ours").info("odd", unshowable=Unshowable(), keys={1: 2, None: 3}, **odd)
    (line,) = lines()
    assert (line["nan"], line["inf"], line["set"], line["keys"]) == ("nan", "-inf", [1], {"1": 2, "None": 3})
    large = json.loads(one_line(1 << 20_000))
    assert large == "<a int that raised ValueError>"
    assert line["unshowable"] == "<a Unshowable that raised RuntimeError>"


def test_what_is_bound_for_a_request_is_in_every_line(lines: Callable[[], list[dict[str, Any]]]) -> None:
    with structlog.contextvars.bound_contextvars(request="r-1"):
        logging.getLogger("theirs").info("a")
        structlog.get_logger("ours").info("b")
    logging.getLogger("theirs").info("c")
    assert [line.get("request") for line in lines()] == ["r-1", "r-1", None]


VALUES = st.recursive(
    st.text() | st.floats() | st.integers() | st.none(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_any_value_makes_one_line(value: Any) -> None:
    text = one_line({"event": value})
    assert text.isprintable()
    json.loads(text, parse_constant=pytest.fail)


def test_last_words_are_lines() -> None:
    script = (
        "import logging, threading\n"
        "from jobs.service_log import configure_logging, log_last_words\n"
        "configure_logging(); log_last_words()\n"
        "logging.getLogger('theirs').warning('%d of %d', 'canary')\n"
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()\n"
        "raise SystemError('at the end')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert told.pop(0) == {
        "event": "a line could not be logged",
        "level": "error",
        "logger": "theirs",
        "error": "TypeError",
    }
    assert [line["event"] for line in told] == ["a thread ended by an error", "the process ends by an error"]
    assert "ZeroDivisionError" in told[0]["exception"]
    assert "at the end" in told[1]["exception"]
