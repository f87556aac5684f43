"""How far a reader walks who follows one measurement."""

from pathlib import Path

from ops.count_walk import count_walk

MOST = {"engine_files": 131, "files": 153, "calls": 15_590, "changes": 5_245}
"""The last counts: lowered with each simplification; a raise needs its reason beside it.

The last raise: a file of the catalog for the analysis `compression`, and `collection.precision`, which is asked at each
product that is added to A and G.
"""


def test_a_measurement_walks_no_further_than_it_did() -> None:
    found = count_walk(Path(__file__).resolve().parents[2])
    assert {name: found[name] for name in MOST if found[name] > MOST[name]} == {}, found
