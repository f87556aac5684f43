"""The prefetch of factors: one layer is decomposed on the device while the next one is on its way there.

A thread reads the next layer's factors back and unpacks them; on CUDA it pins them and sends them
there on a stream of its own. It begins only where the next layer fits beside all that the present
one takes, so that no layer goes down a rung for another's sake.

Factors that are in memory together are hashed ahead by a few threads: SHA-256 of a few layers at once
takes as long as of one.
"""

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from engine.factors.factor_set import LayerFacts
from engine.factors.kronecker_factors import Factors, digest
from engine.linalg.eigendecomposition import rungs
from engine.linalg.eigensolvers import Need
from engine.linalg.linear_operator import Structured
from engine.memory.guard import Guard

Factor = Tensor | Structured
_HASHING = 4
"""Threads that hash."""
_WORTH_A_THREAD = 2**18
"""Bytes that take some 0.2 ms to hash."""

Side = Literal["A", "G"]

Source = Literal["resident", "stored", "merged"]
"""Source of a job's factors: in memory together, in files, or in the files of several sets."""


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """One layer's factors, on the host and where they are decomposed."""

    factors: Factors
    there_A: Factor
    """A on the device; on a CPU the same tensor."""
    there_G: Factor
    sent: torch.cuda.Event | None = None
    """When both have arrived; None where nothing was sent."""
    hashed: Mapping[Side, Future[str]] = field(default_factory=dict)
    """Digests that are being computed already."""

    def digest(self, side: Side) -> str:
        """Return the SHA-256 of one factor as it is kept."""
        known = self.hashed.get(side)
        return digest(self.side(side)[0]) if known is None else known.result()

    def side(self, name: Side) -> tuple[Factor, Factor]:
        """Return one factor as it is kept on the host, and as it stands where it is decomposed."""
        return (self.factors.A, self.there_A) if name == "A" else (self.factors.G, self.there_G)

    def wait(self) -> None:
        """Let the device's present work follow their arrival."""
        if self.sent is None:
            return
        present = torch.cuda.current_stream()
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
    need: Need,
    source: Source,
) -> Generator[Arrived, None, None]:
    """Yield the factors of some layers; the next ones are read while the caller works on the present ones.

    Memory:
        One layer's factors and the next one's, on the host and on the device; what is resident
        takes no more on the host.
    """
    if source == "resident" and device.type == "cpu":
        yield from _hashed_ahead(layers, load)
        return
    side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with ThreadPoolExecutor(1, thread_name_prefix="next-layer") as pool:
        coming: Future[Arrived] | None = None
        for place, facts in enumerate(layers):
            here = _arrived(load(facts.ordinal), device) if coming is None else coming.result()
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


def _hashed_ahead(layers: Sequence[LayerFacts], load: Callable[[int], Factors]) -> Iterator[Arrived]:
    """Yield resident layers, the digests of the next ones on their way."""
    host, hashed = torch.device("cpu"), dict[int, dict[Side, Future[str]]]()
    workers = min(_HASHING, os.cpu_count() or 1)
    with contextlib.ExitStack() as closing:
        pool: ThreadPoolExecutor | None = None
        for place, facts in enumerate(layers):
            for following in layers[place : place + workers + 1]:
                if following.ordinal in hashed:
                    continue
                hashed[following.ordinal] = {}
                for side, factor in _worth_hashing(following, load(following.ordinal)):
                    if pool is None:
                        pool = ThreadPoolExecutor(workers, thread_name_prefix="digest")
                        closing.callback(pool.shutdown, cancel_futures=True)
                    hashed[following.ordinal][side] = pool.submit(digest, factor)
            yield replace(_arrived(load(facts.ordinal), host), hashed=hashed[facts.ordinal])


def _worth_hashing(facts: LayerFacts, factors: Factors) -> Iterator[tuple[Side, Tensor]]:
    """Yield dense factors that take longer to hash than a thread to begin; a shared A is its leader's."""
    sides: tuple[tuple[Side, Factor], ...] = (("G", factors.G), ("A", factors.A))
    for side, factor in sides:
        own = side == "G" or facts.shared_A_with is None
        if own and isinstance(factor, Tensor) and factor.nbytes >= _WORTH_A_THREAD:
            yield side, factor


def _fits(present: LayerFacts, factors: Factors, ahead: int, device: torch.device, guard: Guard, need: Need) -> bool:
    """Whether the next layer's factors, of ``ahead`` bytes, fit beside the first rung of either of the present one."""
    ladders = [
        rungs(rows, need=need, device=device, dtype=dtype) for rows, dtype in _decomposed_rows(present, factors) if rows
    ]
    first = [ladder[0] for ladder in ladders if ladder]
    on_device = ahead if device.type != "cpu" else 0
    return guard.fits(
        device_bytes=on_device + max((cost.device_bytes for cost in first), default=0),
        # pinned besides
        host_bytes=ahead + on_device + max((cost.host_bytes for cost in first), default=0),
    )


def _decomposed_rows(facts: LayerFacts, factors: Factors) -> Iterator[tuple[int, torch.dtype]]:
    """Rows of what is decomposed of A and of G, 0 of a diagonal; of a G kept as its rows that is their Gram matrix."""
    for side in (factors.A, factors.G):
        if isinstance(side, Structured):
            yield min(facts.rank_bound_G or side.size, side.size), torch.float64
        else:
            yield side.shape[0] if side.ndim == 2 else 0, side.dtype


def _arrived(factors: Factors, device: torch.device) -> Arrived:
    return Arrived(factors=factors, there_A=factors.A.to(device), there_G=factors.G.to(device))


def _send(
    load: Callable[[int], Factors], ordinal: int, device: torch.device, side: torch.cuda.Stream | None
) -> Arrived:
    factors = load(ordinal)
    if side is None:
        return _arrived(factors, device)
    with torch.cuda.stream(side):
        there_a, there_g = _sent(factors.A, device), _sent(factors.G, device)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record(side)
    return Arrived(factors=factors, there_A=there_a, there_G=there_g, sent=sent)


def _sent(factor: Factor, device: torch.device) -> Factor:
    if isinstance(factor, Structured):
        return factor.to(device)
    # the pinned copy goes back to torch's host allocator, which keeps it until the stream has read it
    return factor.pin_memory().to(device, non_blocking=True)
