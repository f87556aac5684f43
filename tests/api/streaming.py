"""Reading Server-Sent Events, by the rules of the HTML standard, from whatever gives lines."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx


def parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Every event with its `id` and `type`, and `{"retry": …}` or `{"comment": …}` for what is none."""
    fields: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith(":"):
            yield {"comment": line[1:].strip()}
        elif line:
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
        else:
            if "retry" in fields:
                yield {"retry": int(fields["retry"][-1])}
            if "data" in fields:
                told = json.loads("\n".join(fields["data"]))
                assert (str(told["seq"]), told["type"]) == (fields["id"][-1], fields["event"][-1])
                yield told
            fields = {}


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events alone."""
    assert answer.status_code == 200, answer.read()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    yield from (each for each in parsed(answer.iter_lines()) if "seq" in each)
