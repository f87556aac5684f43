"""Collections without the self-check, in the rooms that hold what is collected against dense matrices.

The check costs as much as a small collection itself, and has rooms of its own; nightly runs leave it on in these too.
"""

import pytest

from tests import oracles
from tests.machine.parts import ALL, chosen_part

UNCHECKED = frozenset({"accumulation", "analyses", "factors", "layers", "merging", "operators"})


@pytest.fixture(autouse=True)
def self_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn it off where a landing need not repeat it; a test whose subject it is asks for it by name."""
    if UNCHECKED & set(request.path.parts) and chosen_part(request.config) != ALL:
        monkeypatch.setitem(oracles.COLLECTION, "self_check", "off")
