"""The failure of a factory's code in a service: where it raised, and nothing that its author keeps to himself."""

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from api.requests.response_bodies import job_view
from catalog.frames import Failed, decode, encode
from catalog.record import plain
from catalog.responses.views import CallerFrame
from jobs.queue.claims import claim
from jobs.schema.database import reading
from jobs.schema.tables import jobs
from worker.process.child_process import EXECUTION
from worker.supervision.attempt_failures import for_callers
from worker.supervision.supervisor import Supervisor

CANARY = "canary-0d1f"
MODULE = "kronoscope_test_leaking"
SOURCE = f"""\
import os
import torch
from torch import nn

TOKEN = "{CANARY}-global"


def seen(place):
    try:
        return open(place, "rb").read().decode(errors="replace")
    except OSError as error:
        return error.strerror


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        password = "{CANARY}-local"
        return self.checked(self.head(x), password)

    def checked(self, x, password):
        if x.device.type == "meta":
            return x
        said = [dict(os.environ), seen(f"/proc/{{os.getppid()}}/environ"), __file__, "\\x1b[31m red \\u202e\\n" * 99]
        try:
            raise KeyError(TOKEN)
        except KeyError as error:
            raise ValueError("".join(map(str, said[2:])) + str(said) * 9) from error


def images():
    raise OSError(2, "no\\x07such file " + "é" * 300, __file__)
    yield
"""


@pytest.fixture
def attempt(
    ledger: Engine, settings: Any, submitted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """``attempt(model=…)``: the id of a job after one attempt of a real child, with secrets of the service about."""
    for name in ("KRONOSCOPE_KEY_SECRET", "DATABASE_URL", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"{CANARY}-{name}")
    folder = tmp_path / "author"
    folder.mkdir()
    (folder / f"{MODULE}.py").write_text(SOURCE)

    def run(**document: Any) -> str:
        job_id: str = submitted(**document)
        chosen = settings(allowed_factories=(f"{MODULE}:Model", f"{MODULE}:images"), paths=(str(folder),))
        held = claim(ledger, job_id, "test", secrets.token_hex(8), chosen.ledger.lease_seconds)
        assert held is not None
        Supervisor(ledger, held, chosen, EXECUTION).run()
        return job_id

    return run


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SOURCE.splitlines(), start=1) if text in line)


@pytest.mark.parametrize("of", ["forward", "data"])
def test_a_caller_learns_where_a_factory_raised_and_nothing_else_of_it(
    attempt: Callable[..., str], job: Any, events: Any, ledger: Engine, tmp_path: Path, of: str
) -> None:
    model = {"source": "factory", "factory": f"{MODULE}:Model"}
    data = {"source": "synthetic", "shape": [12], "examples": 8, "classes": 3}
    images = {"source": "factory", "factory": f"{MODULE}:images"}
    job_id = attempt(model=model, data=data if of == "forward" else images)
    failed = job(job_id)
    assert failed.state == "failed"
    view = plain(job_view(failed))
    failure = view["failure"]
    assert failure["category"] == "usage"
    assert failure["trace"] == (
        [
            {"module": MODULE, "line": line_of("self.checked(self.head"), "function": "Model.forward"},
            {"module": MODULE, "line": line_of("raise ValueError"), "function": "Model.checked"},
        ]
        if of == "forward"
        else [{"module": MODULE, "line": line_of("raise OSError"), "function": "images"}]
    )
    assert f"{MODULE}.py" in failure["message"]  # the last part of a path alone
    assert len(failure["message"].encode()) <= 2048
    assert failure["message"].isprintable()
    told = json.dumps([view, [each.data for each in events(job_id, "state")]], ensure_ascii=False)
    for kept in (
        CANARY,
        str(tmp_path),
        "author",
        "password",
        "raise ",
        "/site-packages",
        "worker.execution",
        "Traceback",
    ):
        assert kept not in told, kept
    with reading(ledger) as connection:
        stored = connection.execute(select(jobs.c.failure).where(jobs.c.id == job_id)).scalar_one()
    assert "raise " in stored["detail"]  # the operator's
    assert str(tmp_path) in stored["detail"]


def test_a_trace_that_holds_anything_but_names_is_no_frame() -> None:
    frame = Failed(category="usage", code="x", message="m", pointer=None, layer=None, detail=None)
    honest = json.loads(encode(frame)) | {"trace": [{"module": "a.b", "line": 3, "function": "C.f.<locals>.<lambda>"}]}
    found = decode(json.dumps(honest).encode())
    assert isinstance(found, Failed)
    assert found.trace == (CallerFrame(module="a.b", line=3, function="C.f.<locals>.<lambda>"),)
    for changes in (
        {"module": "/srv/models/a.py"}, {"function": "f at 0x7f"}, {"module": "a\n"}, {"line": -1},
        {"module": "a" * 300}, {"function": "\x1b[31m"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="frame"):
            decode(json.dumps(honest | {"trace": [honest["trace"][0] | changes]}).encode())
    with pytest.raises(ValueError, match="frame"):
        decode(json.dumps(honest | {"trace": honest["trace"] * 33}).encode())


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("no file /srv/models/secret/a.pt here", "no file …/a.pt here"),
        ("PosixPath('/srv/a')", "PosixPath('…/a')"),
        ("No such file: '/srv/a lab/model b.pt'", "No such file: '…/model b.pt'"),
        ("""in "/srv/a lab's/model.pt".""", """in "…/model.pt"."""),
        ("file:///srv/a and //srv/b", "file:…/a and …/b"),
        ("1/2 of a/b, 3 / 4", "1/2 of a/b, 3 / 4"),
        ("a\nb\x1b[0m\u202e", "a\\nb\\x1b[0m\\u202e"),
    ],
)
def test_what_a_factory_said_is_one_line_without_absolute_paths(said: str, shown: str) -> None:
    frame = Failed(category="usage", code="factory_failed", message=said, pointer=None, layer=None, detail="whole")
    assert for_callers(frame).message == shown
    ours = Failed(category="usage", code="not_found", message=said, pointer=None, layer=None, detail=None)
    assert for_callers(ours) == ours
