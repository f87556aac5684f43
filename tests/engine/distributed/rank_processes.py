"""Ranks as processes of one test: each runs a function inside a gloo group, and leaves what it returns."""

import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

from engine.distributed.group import start, stop
from tests.servers import hold_port

TIMEOUT_SECONDS = 60.0


def asked_for(request: pytest.FixtureRequest, parameter: str) -> tuple[Any, ...]:
    """The values of a parameter among the tests of the file that are run: ranks do nothing for those of other parts."""
    own = (item for item in request.session.items if item.path == request.path)
    values = (getattr(item, "callspec", None) for item in own)
    return tuple(dict.fromkeys(each.params[parameter] for each in values if each and parameter in each.params))


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
    most_seconds: float = 300,
) -> list[Any]:
    """Run ``function(rank, *arguments)`` on ``size`` ranks; return what each returned, or the error that it raised."""
    # of all addresses, as a rank's store listens: one that is free on loopback may be another address's
    with hold_port("0.0.0.0") as held, tempfile.TemporaryDirectory() as folder:
        port = held.getsockname()[1]
        environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_rank, args=(rank, environment, folder, function, arguments, timeout_seconds))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(most_seconds)
            if process.is_alive():
                process.kill()
        files = [Path(folder) / str(rank) for rank in range(size)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _rank(
    rank: int,
    environment: dict[str, str],
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout_seconds: float,
) -> None:
    gc.freeze()  # groups that the run's process left to its collector: here their ends would wait for threads of there
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    start(torch.device("cpu"), timeout_seconds)
    try:
        found = function(rank, *arguments)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        error.add_note(traceback.format_exc())
        found = error
    try:
        torch.save(found, Path(folder) / str(rank))
    except Exception:  # noqa: BLE001 - an error with unpicklable parts
        torch.save(
            RuntimeError(f"{type(found).__name__}: {found}\n{getattr(found, '__notes__', '')}"),
            Path(folder) / str(rank),
        )
    stop()
