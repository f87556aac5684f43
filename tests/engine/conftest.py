"""Collections without the self-check, in the rooms that hold what is collected against dense matrices.

The check costs as much as a small collection itself, and has rooms of its own; nightly runs leave it on in these too.
"""

import pytest

from tests import oracles
from tests.machine.parts import ALL, chosen_part

UNCHECKED = frozenset({
    "accumulation", "analyses", "collection", "factors", "layers", "merging", "operators",
    "test_activation_memory.py", "test_attention.py", "test_attention_masks.py", "test_broadcast_tables.py",
    "test_collection_laws.py", "test_exactness.py", "test_expert_tokens.py", "test_experts.py", "test_invariance.py",
    "test_layer_identities.py", "test_loss_directions.py", "test_recurrent_rewrites.py", "test_routed_rows.py",
})  # fmt: skip
"""Rooms, and files of others."""


@pytest.fixture(autouse=True)
def self_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn it off where a landing need not repeat it; a test whose subject it is asks for it by name."""
    if UNCHECKED & set(request.path.parts) and chosen_part(request.config) != ALL:
        monkeypatch.setitem(oracles.COLLECTION, "self_check", "off")
