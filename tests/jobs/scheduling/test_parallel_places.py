"""The number of places is that of the GPUs and slots that are there for a job, each counted once."""

from collections.abc import Callable

from sqlalchemy import Engine

from jobs.devices.registry import Device, Worker, register
from jobs.scheduling.parallel_places import count_places
from jobs.schema.identifiers import new_id

FACTORY = {"model": {"source": "factory", "factory": "lab.models:net"}}


def gpu(name: str) -> Device:
    return Device(uuid=f"FAKE-{name}", kind="fake", name=name, capacity_bytes=2**30, used_bytes=0)


def host(name: str) -> Device:
    return Device(uuid=f"HOST-{name}", kind="host", name=name, capacity_bytes=2**30, used_bytes=0)


def test_places_are_counted_once(ledger: Engine, queued: Callable[..., str]) -> None:
    def join(*offered: Device, slots: int, expiry: float = 600, factories: tuple[str, ...] = ()) -> None:
        given = {"node": "n", "process_space": "s", "version": "0", "slots": slots, "factories": factories}
        register(ledger, Worker(id=new_id(), **given), offered, expiry)

    job, ours = queued(), queued(**FACTORY)
    assert count_places(ledger, job) == 1, "whoever asks has a place"
    join(host("a"), slots=3)
    assert count_places(ledger, job) == 3
    join(host("a"), slots=2)  # a second worker of one machine
    assert count_places(ledger, job) == 5
    join(gpu("x"), gpu("y"), slots=1)  # two devices, of which one slot uses one at a time
    assert count_places(ledger, job) == 6
    join(gpu("x"), gpu("y"), slots=4)
    assert count_places(ledger, job) == 7
    join(host("b"), slots=50, expiry=-1)  # silent
    assert count_places(ledger, job) == 7
    assert count_places(ledger, ours) == 1, "none of them lists the factory"
    join(host("c"), slots=2, factories=("lab.models:net",))
    assert count_places(ledger, ours) == 2
    assert count_places(ledger, new_id()) == 1
