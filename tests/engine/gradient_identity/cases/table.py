"""The table of all models, by kind."""

from tests.engine.gradient_identity.cases import (
    batch_sizes,
    draws,
    experts,
    kept_state,
    narrow_types,
    outputs,
    rare_batches,
    whole_batches,
)
from tests.engine.gradient_identity.cases.pair import Model

PAIRS = [
    pair
    for module in (
        whole_batches,
        batch_sizes,
        rare_batches,
        kept_state,
        draws,
        narrow_types,
        outputs,
        experts,
    )
    for pair in module.PAIRS
]
MODELS = [Model(pair=pair, is_twin=is_twin) for pair in PAIRS for is_twin in (False, True)]
SIZES = (1, 4, 8)
DTYPES = ("float64", "float32")
