"""Collections without the self-check, in the rooms that hold what is collected against dense matrices.

The check costs as much as a small collection itself, and has rooms of its own; nightly runs leave it on in these too.
"""

import gc

import pytest

from tests import oracles
from tests.machine.parts import ALL, chosen_part

UNCHECKED = frozenset({
    "accumulation", "analyses", "collection", "factors", "layers", "merging", "operators",
    "test_activation_memory.py", "test_attention.py", "test_attention_masks.py", "test_bilinear_and_bags.py",
    "test_broadcast_tables.py", "test_collection_laws.py", "test_decompose_layer.py", "test_device_markers.py",
    "test_exactness.py", "test_expert_tokens.py", "test_experts.py", "test_function_mode.py",
    "test_host_accumulation.py", "test_invariance.py", "test_layer_identities.py", "test_loss_directions.py",
    "test_mixed_precision.py", "test_output_selection.py", "test_peer_failures.py", "test_recurrent_rewrites.py",
    "test_routed_rows.py", "test_scattered_rows.py", "test_traced_operations.py", "test_unusual_models.py",
})  # fmt: skip
"""Rooms, and files of others."""
SHORT_OF_MEMORY = frozenset({
    "test_exact_ggn_check.py", "test_fewshot_training.py", "test_guard.py", "test_products_exact.py",
    "test_reconstruction.py",
})  # fmt: skip
"""Files in which memory runs out again and again, and all garbage is collected each time."""


@pytest.fixture(autouse=True, scope="module")
def few_objects(request: pytest.FixtureRequest) -> None:
    """Collecting garbage looks at what these tests make, and not at what others before them have left."""
    if request.path.name in SHORT_OF_MEMORY:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def is_landing(request: pytest.FixtureRequest) -> bool:
    """Whether a part is run; Git is asked once, and not for each of thousands of tests."""
    return chosen_part(request.config) != ALL


@pytest.fixture(autouse=True)
def self_check(is_landing: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn it off where a landing need not repeat it; a test whose subject it is asks for it by name."""
    if is_landing and UNCHECKED & set(request.path.parts):
        monkeypatch.setitem(oracles.COLLECTION, "self_check", "off")
