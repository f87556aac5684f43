"""The plan's figures: what a budget is held against, and what a layer's record may quote."""

from typing import Literal

from engine.memory.plan import Plan, Term


def term(size: int, place: Literal["device", "host"], source: Literal["exact", "estimated", "measured"]) -> Term:
    return Term(name="t", formula="f", size_bytes=size, place=place, source=source)


def test_the_record_quotes_only_what_shapes_foretell() -> None:
    """A process that held more before is the same faithful run, and must get the same digests."""
    shapes = (term(30, "host", "exact"), term(12, "host", "estimated"), term(5, "device", "exact"))
    plans = [Plan(terms=(*shapes, term(resident, "host", "measured"))) for resident in (100, 900)]
    assert [plan.largest_peak_bytes for plan in plans] == [42, 42]
    assert [plan.peak_bytes("host") for plan in plans] == [142, 942]
