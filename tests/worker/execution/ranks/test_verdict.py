"""The last frame of several ranks: which of them is believed."""

from dataclasses import replace

import pytest

from catalog.frames import Failed, Finished, Frame, Stopped
from worker.execution.ranks.rank_hub import RankEnd, last_frame


def failed(code: str, message: str = "m", category: str = "fatal") -> Failed:
    return Failed(category=category, code=code, message=message, pointer="/x", layer=None, detail=None)  # type: ignore[arg-type]


def end(rank: int, last: Frame | None, at: float = 0, code: int | None = None, **changes: bool) -> RankEnd:
    return RankEnd(rank=rank, last=last, code=code, at=at, **changes)


DONE, STOPPED = Finished(model_sha256="of 0"), Stopped()
SECOND = failed("unexpected", "broke")
LOST = failed("rank_failed", "rank 1 of 2 failed: broke", "transient")


@pytest.mark.parametrize(
    ("ends", "stopped", "expected"),
    [
        ([end(0, DONE), end(1, Finished())], False, DONE),
        # asked to stop when all was done already
        ([end(0, DONE), end(1, Finished())], True, DONE),
        ([end(0, STOPPED), end(1, Finished())], True, STOPPED),
        # ended by the signal before it could listen
        ([end(0, STOPPED), end(1, None, code=143)], True, STOPPED),
        # one that stopped since the other failed
        ([end(0, STOPPED, 1), end(1, SECOND, 0)], False, replace(SECOND, message="rank 1 of 2: broke")),
        ([end(0, SECOND, 2), end(1, STOPPED, 3)], True, replace(SECOND, message="rank 0 of 2: broke")),
        # what is said of another counts only where no other says it itself
        ([end(0, LOST, 0), end(1, SECOND, 1)], False, replace(SECOND, message="rank 1 of 2: broke")),
        ([end(0, LOST, 0), end(1, STOPPED, 1)], False, LOST),
        # the same on all ranks is no rank's own
        ([end(0, SECOND, 0), end(1, SECOND, 1)], False, SECOND),
        ([end(0, failed("a", "first"), 1), end(1, SECOND, 0)], False, replace(SECOND, message="rank 1 of 2: broke")),
    ],
)
def test_who_is_believed(ends: list[RankEnd], stopped: bool, expected: Frame) -> None:
    assert last_frame(ends, stopped=stopped) == expected


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ([end(0, None, 2, 137, killed=True), end(1, None, 1, 139)], "rank 1 of 2 ended without a word (SIGSEGV)"),
        # the others' errors come of its loss
        ([end(0, SECOND, 2), end(1, None, 1, 137)], "rank 1 of 2 ended without a word (SIGKILL)"),
        # a rank that was not seen to end says nothing of how
        ([end(0, DONE), end(1, None)], "rank 1 of 2 ended without a word,"),
    ],
)
def test_an_end_without_a_word_names_rank_and_signal(ends: list[RankEnd], rank: str) -> None:
    last = last_frame(ends, stopped=False)
    assert isinstance(last, Failed)
    assert (last.category, last.code) == ("transient", "rank_lost")
    assert last.message.startswith(rank)


def test_a_rank_that_the_kernel_killed_for_want_of_memory_is_told_as_that() -> None:
    """Where the kernel's count says so; another signal, or an error beside such a kill, is what it is."""
    killed = [end(0, LOST, 2), end(1, None, 1, 137)]
    last = last_frame(killed, stopped=False, exhausted=True)
    assert isinstance(last, Failed)
    assert (last.category, last.code, last.pointer) == ("transient", "oom", "/memory/host")
    assert last.message.startswith("the kernel killed rank 1 of 2 for want of memory")
    assert last.detail == "rank 1 of 2 (SIGKILL)"
    for ends, code in (
        ([end(0, LOST, 2), end(1, None, 1, 139)], "rank_lost"),
        ([end(0, SECOND), end(1, DONE)], SECOND.code),
    ):
        other = last_frame(ends, stopped=False, exhausted=True)
        assert isinstance(other, Failed)
        assert other.code == code
