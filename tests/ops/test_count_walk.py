"""How far a reader walks who follows one measurement."""

from pathlib import Path

from ops.count_walk import count_walk

MOST = {"engine_files": 115, "files": 137, "calls": 16_640, "changes": 4_360}
"""The last counts: lowered with each simplification; a raise needs its reason beside it.

The last raises: shares of parameters by form, which are counted from each layer's record and may warn (two files, 100
calls), the display of progress, torch's losses as tasks, the rounding of each factor, the series that a document
may be, the tokens of experts (one file), influence in the menu, a call in the place of a branch (of an operator on a
matrix, and of a group on its one process), the turns that threads take, a question for checksums that are known, the
first batch in halves (200 calls), trainable tensors that no parameter lists, sums that underflow, Python's and numpy's
generators, the largest gradient beside its squares, and norms at any scale (a file each), the halves on the way back
(500 calls), what rounding may have drawn (500 calls), and complex outputs and undefined gradients, which are looked
for at each (120 calls).
"""


def test_a_measurement_walks_no_further_than_it_did() -> None:
    found = count_walk(Path(__file__).resolve().parents[2])
    assert {name: found[name] for name in MOST if found[name] > MOST[name]} == {}, found
