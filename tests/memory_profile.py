"""The profiler's account of memory: every allocation of torch's, LAPACK's workspace among them."""

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that ``work`` held at once beyond what was held before."""
    gc.collect()  # what is let go of meanwhile, and was held before, would count as free
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    if profiler.profiler is None:
        raise ValueError("the profiler has recorded nothing")
    recorded = profiler.profiler.kineto_results.events()
    events = sorted((each for each in recorded if each.name() == "[memory]"), key=lambda each: each.start_ns())
    held = most = 0
    for each in events:
        held += each.nbytes()
        most = max(most, held)
    return most
