"""The profiler's account of memory: every allocation of torch's, LAPACK's workspace among them."""

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that ``work`` held at once beyond what was held before."""
    (peak,) = _peaks(work, ()).values()
    return peak


def peak_bytes_within(work: Callable[[], object], *names: str) -> dict[str, int]:
    """Most bytes held at once within the operations whose names begin so, beyond what was held before ``work``."""
    return _peaks(work, names)


def _peaks(work: Callable[[], object], names: tuple[str, ...]) -> dict[str, int]:
    gc.collect()  # what is let go of meanwhile, and was held before, would count as free
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    if profiler.profiler is None:
        raise ValueError("the profiler has recorded nothing")
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda each: each.start_ns())
    spans = {
        name: [(each.start_ns(), each.end_ns()) for each in events if each.name().startswith(name)] for name in names
    }
    missing = [name for name, found in spans.items() if not found]
    if missing:
        raise ValueError(f"the profiler has recorded no operation named {', '.join(missing)}")
    held, most = 0, dict.fromkeys(names or ("",), 0)
    for each in events:
        if each.name() != "[memory]":
            continue
        held += each.nbytes()
        for name in most:
            if not name or any(begun <= each.start_ns() <= ended for begun, ended in spans[name]):
                most[name] = max(most[name], held)
    return most
