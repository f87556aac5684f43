"""The guard: looks at what is free before a large allocation, and takes a lower rung where it is too little.

A *rung* is one way to do a piece of work, with the bytes it takes; the *fallbacks* are rungs from the fastest
to the one that takes least. The guard begins where the plan says, passes over what does not fit into what is free
now, and, where memory runs out although it was foreseen to suffice, frees what can be freed, tries the
rung once more and then goes one down. Every rung taken and refused is reported, so that a record can name it. Where
no fallback gives a result, a report says what was requested, held and free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

import torch

from engine.errors import BudgetExceeded, OutOfMemory
from engine.memory.budget import (
    MemoryBudget,
    device_bytes,
    free_device_bytes,
    free_host_bytes,
    give_back_host_memory,
    hold_host,
    resident_bytes,
)
from engine.memory.out_of_memory import first_line, free_memory, ran_out_of_memory
from engine.memory.plan import Chosen, Plan, largest, readable_bytes, written_bytes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Fallback(Generic[T]):
    """One way to do a piece of work; bytes are what it takes beside what is held already."""

    name: str
    formula: str
    device_bytes: int
    host_bytes: int
    run: Callable[[], T]


class FallbackFailed(Exception):
    """A rung could not do it for a reason other than memory: the next one is tried."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A rung that was passed over: it needs more than is free."""

    name: str
    place: Literal["device", "host"]
    needed: int
    free: int


@dataclass(frozen=True, kw_only=True)
class PlanningError:
    """Memory ran out where the plan's figure had said that it suffices."""

    what: str
    layer: str | None
    stage: str
    rung: str
    foreseen_device_bytes: int
    foreseen_host_bytes: int
    free_device_bytes: int
    """Before the attempt."""
    free_host_bytes: int
    said: str
    """The allocator's message."""


@dataclass(frozen=True, kw_only=True)
class FallbackResult(Generic[T]):
    """A result, and the way down to it."""

    value: T
    taken: tuple[str, ...]
    """Rungs that were tried, the last of which gave the value."""
    refused: tuple[Refused, ...]
    planning_errors: tuple[PlanningError, ...]


@dataclass(frozen=True)
class _Ended:
    """Why an attempt gave nothing; holds no traceback, and so no tensor."""

    said: str
    exhausted: bool


@dataclass(kw_only=True)
class Guard:
    """Keeps one job within its budget and within what the machine has left."""

    budget: MemoryBudget
    device: torch.device
    log: Callable[[str, str], None]
    by_kernel: bool = False
    """Let the kernel refuse what would exceed the host's budget."""
    plan: Plan | None = None
    """Plan whose terms a report quotes, once there is one."""
    planning_errors: list[PlanningError] = field(default_factory=list)
    """Planning errors of the whole job."""
    announce: Callable[[Plan | None, Sequence[PlanningError]], None] = lambda _, __: None
    """Receives the plan with each planning error, as it stands from then on."""

    @classmethod
    def unlimited(cls) -> "Guard":
        """Refuses nothing beforehand; what runs out of memory goes down the fallbacks all the same."""
        return cls(budget=MemoryBudget.unlimited(), device=torch.device("cpu"), log=lambda _, __: None)

    def hold(self, plan: Plan | None = None) -> None:
        """Enforce the budget from now on; a plan that does not fit was refused before. Reports quote the plan."""
        self.plan = plan
        if self.by_kernel:
            limit = hold_host(self.budget)
            self.log("debug", f"the kernel holds this process to {readable_bytes(limit)} of data")

    def free_bytes(self, place: Literal["device", "host"]) -> int:
        """Return the bytes that the job may still take in one place, never negative.

        The smaller of the rest of the budget and what the machine has free now.
        """
        if place == "device":
            if self.device.type != "cuda":
                return self.budget.device_bytes
            allocated, _ = device_bytes(self.device)
            return max(0, min(self.budget.device_bytes - (allocated or 0), free_device_bytes(self.device)))
        if self.budget == MemoryBudget.unlimited():
            return self.budget.host_bytes
        return max(0, min(self.budget.host_bytes - resident_bytes(), free_host_bytes()))

    def fits(self, *, device_bytes: int = 0, host_bytes: int = 0) -> bool:
        """Return whether both allocations fit; freed host memory is returned to the system before the answer is no."""
        return self._lacking(device_bytes, host_bytes) is None

    def run_with_fallbacks(
        self, rungs: Sequence[Fallback[T]], *, what: str, layer: str | None, stage: str, begin: str | None = None
    ) -> FallbackResult[T]:
        """Do the work by the first fallback that fits, or by a lower one where that fails.

        Args:
            rungs: From the fastest to the one that takes least.
            what: The work, for messages: `the eigenvectors of G`.
            layer: The layer's name; None for work on no single layer.
            stage: Stage of the job.
            begin: The fallback that the plan chose: those above it are not considered. None, or a name that is not
                among them, begins with the first.

        Raises:
            BudgetExceeded: If none fits into what is free.
            OutOfMemory: If one was predicted to fit, ran out of memory, and no lower one gave a result.
            FallbackFailed: If the last one that was tried failed otherwise; the message lists each.
        """
        start = next((place for place, rung in enumerate(rungs) if rung.name == begin), 0)
        taken: list[str] = []
        refused: list[Refused] = []
        errors: list[PlanningError] = []
        failures: list[str] = []
        last: Fallback[T] | None = None
        for rung in rungs[start:]:
            lacking = self._lacking(rung.device_bytes, rung.host_bytes)
            if lacking is not None:
                place, free = lacking
                needed = rung.device_bytes if place == "device" else rung.host_bytes
                refused.append(Refused(name=rung.name, place=place, needed=needed, free=free))
                where = f" of layer `{layer}`" if layer else ""
                self.log(
                    "info",
                    f"{what}{where}: `{rung.name}` is passed over, as it needs {readable_bytes(needed)} of {place} "
                    f"memory and {readable_bytes(free)} are free",
                )
                continue
            taken.append(rung.name)
            last = rung
            free_before = self.free_bytes("device"), self.free_bytes("host")
            ended = self._attempt(rung)
            if isinstance(ended, _Ended) and ended.exhausted:
                # whatever the attempt held is unreachable only now, outside of its except block
                free_memory(self.device)
                errors.append(
                    PlanningError(
                        what=what,
                        layer=layer,
                        stage=stage,
                        rung=rung.name,
                        foreseen_device_bytes=rung.device_bytes,
                        foreseen_host_bytes=rung.host_bytes,
                        free_device_bytes=free_before[0],
                        free_host_bytes=free_before[1],
                        said=ended.said,
                    )
                )
                self.missed(errors[-1])
                ended = self._attempt(rung)
            if not isinstance(ended, _Ended):
                return FallbackResult(
                    value=ended[0], taken=tuple(taken), refused=tuple(refused), planning_errors=tuple(errors)
                )
            if ended.exhausted:
                free_memory(self.device)
            failures.append(f"{rung.name}: {ended.said}")
        if last is not None and not errors and not refused:
            raise FallbackFailed("; ".join(failures))
        raise self._ended(rungs[start:], what, layer, stage, last if errors else None, refused)

    def _attempt(self, rung: Fallback[T]) -> tuple[T] | _Ended:
        try:
            return (rung.run(),)
        except FallbackFailed as failed:
            return _Ended(str(failed), exhausted=False)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return _Ended(first_line(error), exhausted=True)

    def missed(self, error: PlanningError) -> None:
        """Record that memory ran out although it was predicted to suffice; log and announce it."""
        self.planning_errors.append(error)
        where = f" of layer `{error.layer}`" if error.layer else ""
        self.log(
            "warning",
            f"{error.what}{where} ran out of memory by `{error.rung}`, which was foreseen to fit ({error.said})",
        )
        self.announce(self.plan, self.planning_errors)

    def replan(self, chosen: Chosen) -> None:
        """Replace what the plan chose by what the job continues with, and announce the plan as it is from now on."""
        if self.plan is not None:
            self.plan = replace(self.plan, chosen=chosen)
        self.announce(self.plan, self.planning_errors)

    def exhausted(self, missed: PlanningError, remedy: str) -> OutOfMemory:
        """Return the error, with the whole report, for work that ran out of memory and has no fallback left.

        Args:
            missed: The last attempt.
            remedy: An imperative phrase for the user.
        """
        asked = Fallback(
            name=missed.rung,
            formula=missed.said,
            device_bytes=missed.foreseen_device_bytes,
            host_bytes=missed.foreseen_host_bytes,
            run=lambda: None,
        )
        place: Literal["device", "host"] = "host" if self.device.type != "cuda" else "device"
        return OutOfMemory(
            f"{missed.what} ran out of memory: {self.report(asked, missed.stage)}; {remedy}",
            layer=missed.layer,
            pointer=f"/memory/{place}",
        )

    def _lacking(self, device_bytes: int, host_bytes: int) -> tuple[Literal["device", "host"], int] | None:
        """The place where less is free than that, and what is."""
        if device_bytes > (free := self.free_bytes("device")):
            return "device", free
        if host_bytes > self.free_bytes("host"):
            # what the C library keeps of what was freed counts as held until it is returned
            give_back_host_memory()
            if host_bytes > (free := self.free_bytes("host")):
                return "host", free
        return None

    def _ended(
        self,
        rungs: Sequence[Fallback[Any]],
        what: str,
        layer: str | None,
        stage: str,
        exhausted: Fallback[Any] | None,
        refused: Sequence[Refused],
    ) -> BudgetExceeded:
        cheapest = min(rungs, key=lambda rung: (rung.device_bytes, rung.host_bytes))
        asked = exhausted or cheapest
        place: Literal["device", "host"] = (
            refused[-1].place if refused else "device" if asked.device_bytes > 0 else "host"
        )
        kind = BudgetExceeded if exhausted is None else OutOfMemory
        verb = "does not fit" if exhausted is None else "ran out of memory"
        return kind(
            f"{what}{f' of layer `{layer}`' if layer else ''} {verb}: {self.report(asked, stage)}; "
            f"the cheapest way, `{cheapest.name}`, takes {readable_bytes(_needed(cheapest, place))}: "
            f"{self._remedy(cheapest, place)}",
            layer=layer,
            pointer=f"/memory/{place}",
        )

    def report(self, asked: Fallback[Any], stage: str) -> str:
        """Describe a shortage: the request and its formula, what is held and free, and the plan's largest terms.

        Clauses are joined by semicolons; the terms are those of ``stage``.
        """
        allocated, reserved = device_bytes(self.device)
        held = f"{readable_bytes(resident_bytes())} are resident and {readable_bytes(self.free_bytes('host'))} free"
        parts = [
            f"`{asked.name}` requested {readable_bytes(asked.host_bytes)} of host memory"
            + (f" and {readable_bytes(asked.device_bytes)} of device memory" if asked.device_bytes else "")
            + f" ({asked.formula}), where {held} on the host"
        ]
        if allocated is not None and reserved is not None:
            parts.append(
                f"{readable_bytes(allocated)} are allocated, {readable_bytes(reserved)} reserved and "
                f"{readable_bytes(self.free_bytes('device'))} free on the device"
            )
        terms = [] if self.plan is None else [each for each in self.plan.terms if each.stage in (stage, "throughout")]
        if terms:
            parts.append("the plan counts " + ", ".join(largest(terms, "host" if allocated is None else "device")))
        return "; ".join(parts)

    def _remedy(self, rung: Fallback[Any], place: Literal["device", "host"]) -> str:
        allocated, _ = device_bytes(self.device)
        held = resident_bytes() if place == "host" else allocated or 0
        return f"{self.budget.remedy(place)} to {written_bytes(held + _needed(rung, place))} or more"


def _needed(rung: Fallback[Any], place: Literal["device", "host"]) -> int:
    return rung.device_bytes if place == "device" else rung.host_bytes
