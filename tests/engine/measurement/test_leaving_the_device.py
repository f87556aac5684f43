"""Leaving the device: after the last batch the host copies and hashes, and computes nothing.

There is no device here. Sums become tensors that say they stand on one once the passes are over: what an operation
makes of them stands there too, and a copy to the host is a plain tensor, which is remembered. Any operation on such a
tensor that is neither a copy nor a view is arithmetic on the host.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection import run_passes
from engine.factors import departure
from engine.factors.departure import Departures, departing_bytes
from engine.factors.kronecker_factors import digest, packed
from engine.factors.low_rank import LowRank
from engine.workspace import Workspace
from kronoscope.local import Measurement, measure

DEVICE = torch.device("meta")
COPIES = {"copy_", "_to_copy", "clone", "detach", "alias", "empty", "_local_scalar_dense"}


class OnDevice(Tensor):
    """A tensor that says it stands on a device; its numbers are held by a plain one."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[Self], held: Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return on_device(func, args, dict(kwargs or {}))


def on_device(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operation of tensors on the device gives; a copy of one to the host is remembered."""
    place = kwargs.pop("device", None)
    plain = tree_map(lambda each: each.held if isinstance(each, OnDevice) else each, (args, kwargs))
    name = func.overloadpacket.__name__
    if name == "_to_copy" and place is not None and torch.device(place).type == "cpu":
        return remember(func(*plain[0], **plain[1]).clone())
    if name == "copy_" and not isinstance(args[0], OnDevice):
        return remember(func(*plain[0], **plain[1]))
    made = func(*plain[0], **plain[1])
    if name == "_local_scalar_dense":
        return made
    written = {id(each.held): each for each in args if isinstance(each, OnDevice)}

    def placed(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return written[id(each)] if id(each) in written else OnDevice(each)

    return tree_map(placed, made)


ARRIVED: dict[int, Tensor] = {}
"""What has come to the host, by the place of its storage; held, so that no other takes that place."""


def remember(tensor: Tensor) -> Tensor:
    ARRIVED[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


class Watching(TorchDispatchMode):
    """Makes tensors on the device where that is asked for, and notes what is computed of what has come to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        tensors = [each for each in (*args, *given.values()) if isinstance(each, Tensor)]
        place = given.get("device")
        if any(isinstance(each, OnDevice) for each in tensors):
            return on_device(func, args, given)
        if place is not None and torch.device(place).type == DEVICE.type:
            return OnDevice(func(*args, **given | {"device": "cpu"}))
        name = func.overloadpacket.__name__
        arrived = any(each.untyped_storage().data_ptr() in ARRIVED for each in tensors if each.numel())
        made = func(*args, **given)
        if arrived and name not in COPIES and not func.is_view:
            self.computed.append(name)
        if arrived and name in COPIES and isinstance(made, Tensor):
            remember(made)
        return made


class Inline:
    """A pool that does everything at once, where the mode sees it."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done

    def shutdown(self, **_: object) -> None:
        pass


def job() -> Measurement:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 33), nn.ReLU(), nn.Linear(33, 300), nn.LayerNorm(300)
    )
    data = [(torch.randn(6, 2, 6, 6), torch.randint(0, 300, (6,))) for _ in range(2)]
    return measure(
        model, data, task="classification", kinds=("factors",), collection={"dtype": "float32", "fisher": "empirical"}
    )


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Measurement, list[str]]]:
    """A job whose sums stand on the device from the end of the passes on, and what was computed on the host."""
    mode, keep = Watching(), run_passes.keep_factors
    ARRIVED.clear()
    with contextlib.ExitStack() as watched, monkeypatch.context() as patched:

        def moved(
            workspace: Workspace,
            dtype: torch.dtype,
            state: Any,
            statistics: tuple[LayerStatistics, ...],
            *,
            aside: bool,
        ) -> None:
            workspace.machine.device = DEVICE
            watched.enter_context(mode)
            for found in statistics:
                found.A = None if found.A is None else OnDevice(found.A)
                found.G = None if found.G is None else OnDevice(found.G)
                if found.gradient_rows is not None:
                    rows = found.gradient_rows
                    rows.rows, rows.scales, rows.largest = map(OnDevice, (rows.rows, rows.scales, rows.largest))
            keep(workspace, dtype, state, statistics, aside=aside)

        patched.setattr(run_passes, "keep_factors", moved)
        patched.setattr(departure, "ThreadPoolExecutor", Inline)
        # several panels of each factor
        patched.setattr(departure, "PANEL_NUMBERS", 300)
        found = job()
    assert ARRIVED
    yield found, mode.computed
    ARRIVED.clear()


def test_nothing_is_computed_on_the_host_after_the_last_batch(left: tuple[Measurement, list[str]]) -> None:
    found, computed = left
    # the last linear layer keeps its 12 rows in place of a G of 300
    assert {facts.representation_G for facts in found.factors.collected.layers} == {"dense", "woodbury"}
    assert computed == []


def test_what_left_the_device_is_what_never_was_there(left: tuple[Measurement, list[str]]) -> None:
    found, stayed = left[0], job()
    # but where the rows stood
    here = [{**layer, "rows_place": None} for layer in stayed.index["layers"]]
    assert [{**layer, "rows_place": None} for layer in found.index["layers"]] == here
    for one, other in zip(found.layers, stayed.layers, strict=True):
        assert one.record is not None
        assert other.record is not None
        assert dataclasses.replace(one.record, gradient_rows_device=other.record.gradient_rows_device) == other.record
    for name, factors in stayed.factors.items():
        assert torch.equal(found.factors[name].A, factors.A)


@pytest.mark.part(of=32, by=("dtype",))
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 300, 769])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_triangles_and_digests_are_those_of_the_whole(size: int, dtype: torch.dtype) -> None:
    made = torch.randn(size, size)
    symmetric = (made + made.T).to(dtype)
    rows, columns = torch.triu_indices(size, size)
    with Departures() as leaving:
        found = leaving.send(symmetric, packs=True).result()
        assert isinstance(found.stored, Tensor)
        assert torch.equal(found.stored, symmetric[rows, columns])
        assert torch.equal(found.stored, packed(symmetric))
        assert found.digest == digest(symmetric)
        assert leaving.send(symmetric, packs=False).result().stored is None
        diagonal = leaving.send(symmetric.diagonal().contiguous(), packs=True).result()
        assert isinstance(diagonal.stored, Tensor)
        assert torch.equal(diagonal.stored, symmetric.diagonal())
        side = LowRank(rows=symmetric[: size // 2 + 1], scales=torch.ones(size // 2 + 1), weight=2.0)
        kept = leaving.send(side, packs=True).result()
        assert isinstance(kept.stored, LowRank)
        assert torch.equal(kept.stored.rows, side.rows)
        assert kept.digest == side.digest() == kept.stored.digest()


def test_what_threads_hold_is_bounded() -> None:
    assert departing_bytes(10**9, 4) == departing_bytes(departure.PANEL_NUMBERS, 4)
    # four buffers of 400 bytes, each of which is pinned as 512
    assert departing_bytes(100, 4)[1] == departure.THREADS * 2048


def test_a_factor_leaves_whole_where_its_panels_find_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(departure._Triangle, "of_rows", refuse)
    made = torch.randn(40, 40)
    symmetric = made + made.T
    with Departures() as leaving:
        found = leaving.send(symmetric, packs=True).result()
    assert isinstance(found.stored, Tensor)
    assert torch.equal(found.stored, packed(symmetric))
    assert found.digest == digest(symmetric)
