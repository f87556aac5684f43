"""The prefetch of factors: one layer is decomposed on the device while the next one is on its way there.

A thread reads the next layer's factors back and unpacks them; on CUDA it pins them and sends them
there on a stream of its own. It begins only where the next layer fits beside all that the present
one takes, so that no layer goes down a rung for another's sake.

Factors that are in memory together are hashed ahead by a few threads: SHA-256 of a few layers at once
takes as long as of one. Those that stand on the device leave it by these threads (``departure``).
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard

import torch
from torch import Tensor

from engine.factors.dense import Dense, as_operator
from engine.factors.departure import THREADS, Departed, Departures, leaves
from engine.factors.factor_set import LayerFacts
from engine.factors.kronecker_factors import Factors, digest
from engine.linalg.eigendecomposition import rungs
from engine.linalg.eigensolvers import Need
from engine.linalg.linear_operator import Structured
from engine.memory.guard import Guard

Factor = Tensor | Structured
_WORTH_A_THREAD = 2**18
"""Bytes that take some 0.2 ms to hash."""

Side = Literal["A", "G"]

Source = Literal["resident", "stored", "merged"]
"""Source of a job's factors: in memory together, in files, or in the files of several sets."""


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """One layer's factors, as they are kept and where they are computed with."""

    factors: Factors
    """On the host, or where their sums stood if they leave the device only once."""
    there_A: Tensor
    """A on the device; on a CPU the same tensor."""
    there_G: Factor
    sent: torch.cuda.Event | None = None
    """When both have arrived; None where nothing was sent."""
    leaving: Mapping[Side, Future[Departed]] = field(default_factory=dict)
    """Digests that are being computed already, and what leaves the device with them."""

    def digest(self, side: Side) -> str:
        """Return the SHA-256 of one factor as it is kept."""
        leaving = self.leaving.get(side)
        kept = self.factors.A if side == "A" else self.factors.G
        return digest(kept) if leaving is None else leaving.result().digest

    @property
    def stored(self) -> Mapping[Side, Factor]:
        """Those that have left the device, as they are stored."""
        found = {side: leaving.result().stored for side, leaving in self.leaving.items()}
        return {side: stored for side, stored in found.items() if stored is not None}

    def side(self, name: Side, rank_bound: int | None) -> Dense | Structured:
        """Return one factor where it is decomposed, with itself on the host."""
        own = self.factors
        kept, there, scale = (own.A, self.there_A, own.scale_A) if name == "A" else (own.G, self.there_G, own.scale_G)
        host = kept if isinstance(kept, Tensor) and kept.device.type == "cpu" else None
        return as_operator(there, scale, rank_bound, host)

    def wait(self) -> None:
        """Let the device's present work follow their arrival."""
        if self.sent is None:
            return
        present = torch.cuda.current_stream(self.there_A.device)
        present.wait_event(self.sent)
        for factor in (self.there_A, self.there_G):
            if isinstance(factor, Tensor):
                # allocated on another stream, whose allocator must not give it away before this one is done
                factor.record_stream(present)


def merge_bytes(facts: LayerFacts, item: int) -> int:
    """Compute the bytes that a merge of one layer holds: both sums in float64, and one set's factors as read."""
    numbers = (facts.in_dim if facts.form == "diagonal" else facts.in_dim**2) + (
        facts.out_dim if facts.form == "diagonal_block" else _rows_of(facts) * facts.out_dim
    )
    return 8 * numbers + ahead_bytes(facts.in_dim, _rows_of(facts), item)


def _rows_of(facts: LayerFacts) -> int:
    """Rows of what G is kept as."""
    if facts.representation_G == "dense":
        return facts.out_dim
    return min(facts.rank_bound_G or facts.out_dim, facts.out_dim)


def ahead_bytes(in_dim: int, out_dim: int, item: int) -> int:
    """Compute the bytes of the next layer's factors while they are read: both dense, and one packed triangle."""
    return item * (in_dim**2 + out_dim**2 + max(in_dim, out_dim) ** 2 // 2)


def stream_factors(
    layers: Sequence[LayerFacts],
    load: Callable[[int], Factors],
    *,
    device: torch.device,
    guard: Guard,
    need: Need | None,
    source: Source,
    packs: bool = False,
) -> Generator[Arrived, None, None]:
    """Yield the factors of some layers; the next ones are read while the caller works on the present ones.

    ``load`` returns the factors of an ordinal, ``device`` is where the caller computes, and ``guard`` tells what else
    fits. ``need`` is what is computed of a decomposition; None where nothing is decomposed, and each factor stays where
    it is. ``packs`` says whether factors that leave the device are stored.

    Memory:
        One layer's factors and the next one's, on the host and on the device; what is resident
        takes no more on the host but what leaves the device ahead: of a few layers, what is stored of them.
    """
    if source == "resident" and (device.type == "cpu" or need is None):
        yield from _hashed_ahead(layers, load, device, packs=packs)
        return
    sends = need is not None and device.type == "cuda"
    side = torch.cuda.Stream(device) if sends else None  # type: ignore[no-untyped-call]
    with ThreadPoolExecutor(1, thread_name_prefix="next-layer") as pool:
        coming: Future[Arrived] | None = None
        for place, facts in enumerate(layers):
            here = _send(load, facts.ordinal, device, side) if coming is None else coming.result()
            coming = None
            following = layers[place + 1] if place + 1 < len(layers) else None
            if following is not None:
                item = here.factors.A.element_size()
                merging = merge_bytes(following, item) if source == "merged" else 0
                ahead = max(ahead_bytes(following.in_dim, following.out_dim, item), merging)
            if following is not None and _fits(facts, here.factors, ahead, device, guard, need):
                coming = pool.submit(_send, load, following.ordinal, device, side)
            here.wait()
            yield here
            del here


def _hashed_ahead(
    layers: Sequence[LayerFacts], load: Callable[[int], Factors], device: torch.device, *, packs: bool
) -> Iterator[Arrived]:
    """Yield resident layers, the digests of the next ones on their way, and what of them leaves the device."""
    leaving = dict[int, dict[Side, Future[Departed]]]()
    on_device = device.type != "cpu"
    with contextlib.ExitStack() as closing:
        pool: Departures | None = None
        for place, facts in enumerate(layers):
            for following in layers[place : place + THREADS + 1]:
                if following.ordinal in leaving:
                    continue
                leaving[following.ordinal] = {}
                for side, factor in _own(following, load(following.ordinal)):
                    if on_device and leaves(factor, device):
                        pool = pool or closing.enter_context(Departures())
                        leaving[following.ordinal][side] = pool.send(factor, packs=packs)
                    elif _is_worth_a_thread(factor):
                        pool = pool or closing.enter_context(Departures())
                        leaving[following.ordinal][side] = pool.hash(factor)
            yield replace(_as_kept(load(facts.ordinal), device), leaving=leaving.pop(facts.ordinal))


def _own(facts: LayerFacts, factors: Factors) -> Iterator[tuple[Side, Factor]]:
    """Yield a layer's factors; a shared A is its leader's."""
    yield "G", factors.G
    if facts.shared_A_with is None:
        yield "A", factors.A


def _is_worth_a_thread(factor: Factor) -> TypeGuard[Tensor]:
    """Return whether a dense factor takes longer to hash than a thread to begin."""
    return isinstance(factor, Tensor) and factor.nbytes >= _WORTH_A_THREAD


def _as_kept(factors: Factors, device: torch.device) -> Arrived:
    """Factors where they are; what stands for a G computes on the device."""
    there = factors.G if isinstance(factors.G, Tensor) else factors.G.to(device)
    return Arrived(factors=factors, there_A=factors.A, there_G=there)


def _fits(
    present: LayerFacts, factors: Factors, ahead: int, device: torch.device, guard: Guard, need: Need | None
) -> bool:
    """Whether the next layer's factors, of ``ahead`` bytes, fit beside the first rung of either of the present one."""
    ladders = [
        rungs(rows, need=need, device=device, dtype=dtype)
        for rows, dtype in _decomposed_rows(present, factors)
        if rows and need is not None
    ]
    first = [ladder[0] for ladder in ladders if ladder]
    on_device = ahead if need is not None and device.type != "cpu" else 0
    return guard.fits(
        device_bytes=on_device + max((cost.device_bytes for cost in first), default=0),
        # pinned besides, each factor in a block that torch rounds up to a power of two
        host_bytes=ahead + 2 * on_device + max((cost.host_bytes for cost in first), default=0),
    )


def _decomposed_rows(facts: LayerFacts, factors: Factors) -> Iterator[tuple[int, torch.dtype]]:
    """Rows of what is decomposed of A and of G, 0 of a diagonal; of a G kept as its rows that is their Gram matrix."""
    for side in (factors.side_A, factors.side_G):
        if side.kind == "dense":
            yield 0 if side.is_diagonal else side.size, side.storage_dtype
        else:
            yield min(facts.rank_bound_G or side.size, side.size), torch.float64


def _send(
    load: Callable[[int], Factors], ordinal: int, device: torch.device, side: torch.cuda.Stream | None
) -> Arrived:
    factors = load(ordinal)
    if side is None:
        return _as_kept(factors, device)
    with torch.cuda.stream(side):
        there_a = _sent(factors.A, device)
        there_g = _sent(factors.G, device) if isinstance(factors.G, Tensor) else factors.G.to(device)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record(side)
    return Arrived(factors=factors, there_A=there_a, there_G=there_g, sent=sent)


def _sent(factor: Tensor, device: torch.device) -> Tensor:
    # the pinned copy goes back to torch's host allocator, which keeps it until the stream has read it
    return factor.pin_memory().to(device, non_blocking=True)
