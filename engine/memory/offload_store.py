"""An offload store: named tensors on the host, and a cache of them on a device with a capacity in bytes.

Host memory is pinned where that exists. What is loaded stays on the device until others need its place, the least
recently used going first; a tensor that is alone beyond the capacity is loaded and not kept. Nothing is fetched before
it is asked for.
"""

import time
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from engine.errors import UsageError


class OffloadStore:
    """Tensors by name."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Begin with none; the cache holds at most so many bytes on the device, None all that was loaded, 0 nothing."""
        self.capacity_bytes = capacity_bytes
        self._held: dict[str, Tensor] = {}
        self._cached: OrderedDict[tuple[str, str], Tensor] = OrderedDict()
        self._counts = {"to_cpu": 0, "to_gpu": 0, "hits": 0, "evictions": 0, "bytes_to_cpu": 0, "bytes_to_gpu": 0}
        self._seconds = 0.0

    def offload(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor, of any shape, dtype and device, to the host, in place of an earlier one of that name."""
        started = time.perf_counter()
        pinned = torch.cuda.is_available()
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned, memory_format=torch.contiguous_format)
        host.copy_(tensor.detach())
        self._held[name] = host
        for key in [key for key in self._cached if key[0] == name]:
            del self._cached[key]
        self._count("to_cpu", host.nbytes, started)

    def load(self, name: str, device: torch.device | str) -> Tensor:
        """Return a tensor on a device, from the cache where it is there; nothing may write to it.

        ``UsageError`` if nothing has that name.
        """
        if name not in self._held:
            known = ", ".join(sorted(self._held)[:10]) or "none"
            raise UsageError(f"no tensor `{name}` was offloaded; there are: {known}")
        place = torch.device(device)
        key = (name, str(place))
        if key in self._cached:
            self._cached.move_to_end(key)
            self._counts["hits"] += 1
            return self._cached[key]
        started = time.perf_counter()
        host = self._held[name]
        loaded = host.to(place, non_blocking=host.is_pinned(), copy=place.type == "cpu")
        if place.type == "cuda":
            torch.cuda.current_stream(place).synchronize()
        self._count("to_gpu", host.nbytes, started)
        self._keep(key, loaded)
        return loaded

    def release(self, name: str) -> None:
        """Remove a tensor; nothing happens where nothing has that name."""
        self._held.pop(name, None)
        for key in [key for key in self._cached if key[0] == name]:
            del self._cached[key]

    @property
    def host_bytes(self) -> int:
        """Bytes on the host."""
        return sum(tensor.nbytes for tensor in self._held.values())

    @property
    def cached_bytes(self) -> int:
        """Bytes on devices that the cache holds."""
        return sum(tensor.nbytes for tensor in self._cached.values())

    def statistics(self) -> dict[str, Any]:
        """Return counts of copies, their bytes and mean milliseconds, and how the cache did.

        Calls count on a machine without a GPU too, where a load is a copy on the host.
        """
        counts = self._counts
        transfers, loads = counts["to_cpu"] + counts["to_gpu"], counts["to_gpu"] + counts["hits"]
        return {
            "num_transfers_to_cpu": counts["to_cpu"],
            "num_transfers_to_gpu": counts["to_gpu"],
            "avg_transfer_time_ms": 1000 * self._seconds / transfers if transfers else 0.0,
            "bytes_to_cpu": counts["bytes_to_cpu"],
            "bytes_to_gpu": counts["bytes_to_gpu"],
            "hit_rate": counts["hits"] / loads if loads else 0.0,
            "evictions": counts["evictions"],
            "pinned": bool(self._held) and all(tensor.is_pinned() for tensor in self._held.values()),
        }

    def _keep(self, key: tuple[str, str], tensor: Tensor) -> None:
        if self.capacity_bytes is not None and tensor.nbytes > self.capacity_bytes:
            return
        while self.capacity_bytes is not None and self.cached_bytes + tensor.nbytes > self.capacity_bytes:
            self._cached.popitem(last=False)
            self._counts["evictions"] += 1
        self._cached[key] = tensor

    def _count(self, direction: str, size: int, started: float) -> None:
        self._counts[direction] += 1
        self._counts[f"bytes_{direction}"] += size
        self._seconds += time.perf_counter() - started
